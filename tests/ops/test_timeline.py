"""The memory of a step over time, and what the allocator makes of it."""

from __future__ import annotations

from math import prod
from random import Random

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tilefit.capture.run import capture
from tilefit.ops import Step
from tilefit.ops.allocator import Allocator, replayed
from tilefit.ops.dtypes import size_bytes
from tilefit.ops.timeline import (
    ACTIVATIONS,
    CASTS,
    GRADIENTS,
    INPUTS,
    LOGITS,
    OPTIMIZER_STATE,
    PARAMETERS,
    WORK,
    Timeline,
)


class Net(nn.Module):
    """Two blocks and a head of many classes."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
            for _ in range(2)
        )
        self.head = nn.Linear(32, 500)
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.again else block(x))
        return self.head(x)


def _loss(out: torch.Tensor) -> torch.Tensor:
    return cross_entropy(out, torch.zeros_like(out[:, 0], dtype=torch.long))


@pytest.fixture(scope="module")
def steps() -> dict[str, Step]:
    """The same model trained, trained with checkpointing, under autocast, and called."""
    x = torch.empty(256, 32)
    return {
        "train": capture(Net(False), x, loss=_loss),
        "again": capture(Net(True), x, loss=_loss),
        "amp": capture(Net(False), x, loss=_loss, amp="bf16"),
        "call": capture(Net(False), x, train=False),
    }


@pytest.mark.parametrize("kind", ["train", "again", "amp", "call"])
def test_owners_add_up_to_the_peak(steps: dict[str, Step], kind: str) -> None:
    memory = steps[kind].memory
    peak = memory.timeline.peak()
    assert peak.total_bytes == memory.peak_bytes
    assert sum(memory.timeline.blocks[number].size_bytes for number in peak.blocks) == memory.peak_bytes
    moments = memory.timeline.moments(7)
    assert len(moments) <= 7
    assert max(moment.total_bytes for moment in moments) == memory.peak_bytes


@pytest.mark.parametrize("kind", ["train", "again", "amp", "call"])
def test_every_operation_fits_in_the_peak(steps: dict[str, Step], kind: str) -> None:
    for entry in steps[kind].ops:
        tensors = {ref.id: prod(ref.shape) * size_bytes(ref.dtype) for ref in (*entry.inputs, *entry.outputs)}
        assert sum(tensors.values()) <= steps[kind].memory.peak_bytes


def test_owners(steps: dict[str, Step]) -> None:
    parameters = 4 * sum(parameter.numel() for parameter in Net(False).parameters())
    peak = steps["train"].memory.timeline.peak()
    assert peak.owners[PARAMETERS] == parameters
    assert peak.owners[OPTIMIZER_STATE] == 2 * parameters
    assert peak.owners[INPUTS] == 4 * 256 * 32
    # Logits, their logarithmic softmax and its gradient.
    assert peak.owners[LOGITS] == pytest.approx(3 * 4 * 256 * 500, rel=0.01)
    assert next(iter(steps["train"].memory.timeline.modules(peak.blocks))) in ("blocks.0.1", "blocks.0.2")
    assert {CASTS, ACTIVATIONS} <= set(steps["amp"].memory.timeline.peak().owners)
    at_end = steps["train"].memory.timeline.moments(10**6)[-1]
    assert at_end.owners[GRADIENTS] == parameters
    assert at_end.owners.get(WORK, 0) <= 2 * parameters


def test_training_needs_more_than_a_call_and_checkpointing_less(steps: dict[str, Step]) -> None:
    train, again, call = (steps[kind].memory for kind in ("train", "again", "call"))
    assert call.peak_bytes < again.peak_bytes < train.peak_bytes
    assert again.parameter_bytes == train.parameter_bytes
    assert again.timeline.peak().owners[PARAMETERS] == train.timeline.peak().owners[PARAMETERS]


def test_it_survives_being_written_and_grows_with_the_batch(steps: dict[str, Step]) -> None:
    step = steps["amp"]
    assert Step.from_json(step.to_json()).memory == step.memory
    twice = step.memory.on_batch(2).timeline.peak()
    assert twice.total_bytes == step.memory.on_batch(2).peak_bytes
    assert twice.owners[PARAMETERS] == step.memory.parameter_bytes
    assert Timeline().peak().total_bytes == 0


# ---- the allocator -----------------------------------------------------------------------------


def test_small_requests_share_a_segment_and_large_ones_have_their_own() -> None:
    allocator = Allocator()
    allocator.make(0, 1)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (512, 2 << 20)
    allocator.make(1, 1 << 20)
    assert allocator.reserved_bytes == 2 << 20
    allocator.make(2, (1 << 20) + 1)
    assert allocator.reserved_bytes == 22 << 20
    allocator.make(3, (29 << 20) + (1 << 19))  # what is left of a segment is too little to be cut off
    assert allocator.reserved_bytes == 52 << 20
    assert allocator.allocated_bytes == 512 + (1 << 20) + (1 << 20) + 512 + (30 << 20)
    for key in (0, 1, 2, 3):
        allocator.free(key)
    assert allocator.allocated_bytes == 0
    allocator.make(4, 20 << 20)  # neighbours that were freed are one
    allocator.make(5, 2 << 10)
    assert allocator.reserved_bytes == 52 << 20


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_given_twice(seed: int) -> None:
    numbers = Random(seed)
    requests = [(numbers.randrange(10), numbers.randrange(1 << numbers.randrange(1, 26))) for _ in range(80)]
    allocator, held = Allocator(), dict[int, int]()
    for key, size in requests:
        if key in held:
            allocator.free(key)
            del held[key]
        else:
            allocator.make(key, size)
            held[key] = size
        assert sum(held.values()) <= allocator.allocated_bytes <= allocator.reserved_bytes
    for key in held:
        allocator.free(key)
    assert allocator.allocated_bytes == 0


def test_what_a_step_reserves(steps: dict[str, Step]) -> None:
    timeline = steps["train"].memory.timeline
    allocator = replayed(timeline)
    assert timeline.peak().total_bytes <= allocator.peak_allocated_bytes <= allocator.reserved_bytes
