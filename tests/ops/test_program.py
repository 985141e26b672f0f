"""What a step says of the program around it."""

from __future__ import annotations

import pytest

from tilefit.ops import Assumption, Habit, HostEvent, Loader, Program, Site, Step
from tilefit.ops.program import TO_GPU, TO_HOST, WAIT


def test_a_program_is_written_and_read_with_its_step() -> None:
    program = Program(
        "train.py --batch-size 4",
        "AdamW, bf16 autocast",
        2,
        events=(HostEvent(0, WAIT, "item", Site("model", "train.py:1")),),
        assumptions=(Assumption("item", "fp32[]", "1.0", "train.py:1"),),
        loaders=(Loader("train.py:2", 4, 0, False, 0.1, 3),),
        habits=(Habit("detect_anomaly", Site("", "train.py:3")),),
        fake=("MNIST: 60000 random images",),
    )
    step = Step(ops=(), program=program)
    assert Step.from_json(step.to_json()) == step
    assert not Step.from_json(Step(ops=()).to_json()).program


@pytest.mark.parametrize(
    ("kind", "pinned", "non_blocking", "blocks"),
    [
        (WAIT, False, False, True),
        (TO_HOST, False, False, True),
        (TO_HOST, True, True, False),
        (TO_GPU, True, True, False),
        (TO_GPU, True, False, True),
        (TO_GPU, False, True, True),
    ],
)
def test_a_copy_blocks_unless_it_is_asked_not_to_from_pinned_memory(
    kind: str, pinned: bool, non_blocking: bool, blocks: bool
) -> None:
    event = HostEvent(0, kind, "to", Site(), 4, pinned=pinned, non_blocking=non_blocking)
    assert event.blocks == blocks
