"""Ways for a training to hold less, beside sharding and checkpointing: their price, and what they change.

None is made unless it is asked for. Sources: Dettmers and others, "8-bit Optimizers via Block-wise
Quantization", 2022; Ren and others, "ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021 (state
on the host); Rhu and others, "vDNN", 2016 (activations on the host); Hsu and others, "Liger Kernel: Efficient
Triton Kernels for LLM Training", 2024 (the loss in chunks, with its gradients in the forward pass).
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path

from tilefit.cost.waits import host_bytes_per_s, host_memory_bytes_per_s
from tilefit.errors import UsageError
from tilefit.ops.memory import CHUNKS, OF_BF16, OF_EIGHT_BITS
from tilefit.parallel.blocks import Block, Blocks
from tilefit.parallel.choices import Precision
from tilefit.parallel.training import RankMemory, StepTime, Training

#: What each direction of a link delivers while the other one is used, too, of what it does alone: 50.7 of
#: 55.4 GB/s (an H100, ``benchmarks/memory_choices.py``).
_BOTH = 0.915
#: Tensors whose state passes through the GPU at once, of the largest: seen with three copies on their way.
_ON_THEIR_WAY = 2


@dataclass(frozen=True, slots=True)
class MemoryChoice:
    """A way to hold less.

    Attributes:
        name: As it is asked for.
        level: ``safe`` (the same function) or ``unsafe`` (it rounds what is trained).
        words: What it does.
        how: What does it.
    """

    name: str
    level: str
    words: str
    how: str


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
CHOICES = tuple(
    MemoryChoice(name, **{key: text.format(chunks=CHUNKS) for key, text in said.items()})
    for name, said in _TABLES.items()
)
_BY_NAME = {choice.name: choice for choice in CHOICES}
#: Choices that are two ways to do one thing.
EITHER = (("loss-in-chunks", "fused-loss"), ("optimizer-bf16", "optimizer-8bit"))


def require_choices(names: Collection[str], where: str) -> None:
    """Refuse names of no choices, and two ways to do one thing.

    Raises:
        UsageError: there are such.
    """
    for name in names:
        if name not in _BY_NAME:
            raise UsageError(
                f"nothing takes less memory by the name of {name}",
                where=where,
                hint=f"There are {', '.join(_BY_NAME)}.",
            )
    for both in EITHER:
        if set(both) <= set(names):
            raise UsageError(f"{' and '.join(both)} are two ways to do one thing", where=where)


def said_of(names: Collection[str]) -> list[str]:
    """A sentence for each choice, as the plan is made with it."""
    made = [choice for choice in CHOICES if choice.name in names]
    return [f"With {each.name} ({each.level}): {each.words} ({each.how})." for each in made]


@dataclass(frozen=True)
class Thrifty(Training):
    """A split that holds less of what its choices name.

    Attributes:
        choices: Their names.
    """

    choices: frozenset[str] = frozenset()

    @classmethod
    def of(cls, training: Training, names: Collection[str]) -> Training:
        """A split with some choices made; the split itself where there are none."""
        if not names:
            return training
        values = {each.name: getattr(training, each.name) for each in fields(Training)}
        values |= {
            "precision": _shortened(training.precision, names),
            "blocks": _chunked(training, names),
        }
        return cls(**values, choices=frozenset(names))

    # --- copies to the host and back --------------------------------------------------------------

    def _host_s(self, size: float, directions: int = 1) -> float:
        """Copying so many bytes over a GPU's link, while every GPU of its machine does so."""
        gpu, sharing = self.fabric.gpu, min(self.split.gpus, self.fabric.per_machine) * directions
        link = host_bytes_per_s(gpu) * (_BOTH if directions > 1 else 1.0)
        return size / min(link, host_memory_bytes_per_s(gpu) / sharing)

    @property
    def _activations_leave(self) -> bool:
        return "activations-on-host" in self.choices

    def _moved(self, block: Block) -> float:
        """Bytes of a block that a micro-batch keeps on the host."""
        return super()._kept(block) if self._activations_leave and not self._is_end(block) else 0.0

    def _waits_s(self, block: Block) -> tuple[float, float]:
        """What its two passes wait for copies that they do not hide."""
        base, moved_s = super()._timed(block), self._host_s(self._moved(block))
        forward_s, backward_s = (max(0.0, moved_s - each) for each in base.pass_s)
        return forward_s, backward_s

    def _timed(self, block: Block) -> Block:
        made, (forward_s, backward_s) = super()._timed(block), self._waits_s(block)
        return replace(
            made,
            forward_link_s=made.forward_link_s + forward_s,
            backward_link_s=made.backward_link_s + backward_s,
        )

    def _hosted(self, stage: int) -> float:
        """Bytes of the optimizer's state that lie on the host; FSDP's shards are its fp32 copy."""
        if "optimizer-on-host" not in self.choices:
            return 0.0
        each = self.precision.optimizer - self.precision.master * (self.split.zero == 3)
        return each * self._held(self._sum_of(self.stages[stage]), self.split.zero > 0)

    def _largest(self, stage: int) -> float:
        """Of a stage's parameters, the share of the largest tensor: mostly a table's or a head's."""
        own = self.stages[stage]
        sizes = [each.parameters / (1 if self._is_end(each) else max(1, each.tensors)) for each in own]
        return max(sizes) / max(1, sum(each.parameters for each in own))

    def _update_waits_s(self, stage: int) -> float:
        """State comes and goes at once while what came before is updated; the first tensor comes, and the
        last one goes, beside nothing."""
        hosted = self._hosted(stage)
        moved_s = self._host_s(hosted, 2) + 2 * self._host_s(hosted * self._largest(stage))
        return max(0.0, moved_s - super()._optimizer_s(stage))

    def _optimizer_s(self, stage: int) -> float:
        return super()._optimizer_s(stage) + self._update_waits_s(stage)

    def _time(self) -> StepTime:
        """What it waits for copies to and from the host is told apart."""
        made = super()._time()
        slowest = max(self.stages, key=lambda own: sum(sum(self._times(each).pass_s) for each in own))
        waits_s = self.split.parts * sum(sum(self._waits_s(each)) for each in slowest)
        update_s = max(map(self._update_waits_s, range(self.split.pipeline)))
        return replace(
            made,
            tensor_s=made.tensor_s - waits_s,
            optimizer_s=made.optimizer_s - update_s,
            host_s=waits_s + update_s,
        )

    # --- memory -----------------------------------------------------------------------------------

    def _kept(self, block: Block) -> float:
        return 0.0 if self._moved(block) else super()._kept(block)

    def stage_memory(self, stage: int) -> RankMemory:
        """In the backward pass, or while the state of a few tensors passes through at the update."""
        made, hosted = super().stage_memory(stage), self._hosted(stage)
        if not hosted:
            return made
        elements = self._held(self._sum_of(self.stages[stage]), self.split.zero > 1)
        made = replace(made, optimizer=made.optimizer - hosted)
        update = replace(
            made,
            gradients=elements
            * self.precision.gradient
            / (self.split.replicas if self.split.zero > 1 else 1),
            optimizer=made.optimizer + hosted * min(1.0, _ON_THEIR_WAY * self._largest(stage)),
            activations=0.0,
            temporary=0.0,
        )
        return max(made, update, key=lambda each: each.total)

    def host_bytes(self) -> float:
        """What a rank keeps in the host's memory at most."""
        flight = self.split.parts if self.split.pipeline > 1 else 1
        return max(
            self._hosted(stage) + flight * sum(map(self._moved, self.stages[stage]))
            for stage in range(self.split.pipeline)
        )


def _shortened(precision: Precision, names: Collection[str]) -> Precision:
    """With shorter moments; the fp32 copy of the weights stays."""
    share = OF_BF16 if "optimizer-bf16" in names else OF_EIGHT_BITS if "optimizer-8bit" in names else 1.0
    moments = precision.optimizer - precision.master
    return replace(precision, optimizer=precision.master + moments * share)


def _chunked(training: Training, names: Collection[str]) -> Blocks:
    """With a loss that holds a chunk of the logits at a time."""
    blocks, after = training.blocks, training.blocks.after
    if not {"loss-in-chunks", "fused-loss"} & set(names) or not after.logits_bytes:
        return blocks
    saved = after.logits_bytes - after.logits_surplus_bytes
    in_chunks = "loss-in-chunks" in names
    weight, work = training.precision.weight, training.precision.work
    # Each chunk's part of the weight's gradient is read, and the sum read and written.
    moved = (CHUNKS - 1) * 3 * weight if in_chunks else CHUNKS * (2 * weight + work)
    summed_s = training._copied_s(after.parameters + blocks.tied, moved)
    after = replace(
        after,
        backward_s=after.backward_s + after.forward_s * in_chunks + summed_s,
        saved_bytes=after.saved_bytes - saved,
        surplus_bytes=after.surplus_bytes - after.logits_surplus_bytes + after.logits_bytes // CHUNKS,
    )
    return replace(blocks, after=after)
