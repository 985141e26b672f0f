"""Splits a step over GPUs: replicas, micro-batches, tensor-parallel ranks, pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from tilefit.errors import UsageError
from tilefit.ops import BACKWARD_DATA, FORWARD, OPTIMIZER, Exchange, Shard, Site, Step
from tilefit.ops.collective import ALL_REDUCE
from tilefit.ops.dtypes import size_bytes
from tilefit.ops.scaling import scale_batch
from tilefit.options import MOST_LINKED, Split
from tilefit.parallel.pipeline import stages
from tilefit.parallel.roles import Roles
from tilefit.parallel.tensor import tensor_parallel
from tilefit.rules.exchanges import BUCKET_BYTES, beside
from tilefit.rules.sites import pattern
from tilefit.units import counted

#: Megatron-LM fills the vocabulary up to a multiple of the ranks times this
#: (``--make-vocab-size-divisible-by``).
MEGATRON_VOCABULARY = 128


_NOTHING_SPLIT = "tensor-parallel ranks share nothing that was recognised in this step: each does all of it"


@dataclass(frozen=True, slots=True)
class SplitStep:
    """A step as it is split.

    Attributes:
        split: How.
        stages: One micro-batch's step on one rank of each pipeline stage, the optimizer's work at the end.
        problems: What keeps the split from running, or from being even.
        notes: What was inferred, and what is left out.
    """

    split: Split
    stages: tuple[Step, ...]
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def tensor_flop(self) -> int:
        """Of a whole step, on one GPU in the mean."""
        of_all_stages = sum(stage.tensor_flop for stage in self.stages)
        return of_all_stages * self.split.parts // self.split.pipeline


def split_step(step: Step, split: Split) -> SplitStep:
    """Split a step.

    Args:
        step: The whole step with the global batch, as captured: not fused.
        split: How.

    Raises:
        UsageError: the batch is unknown or does not divide, or there are fewer layers than stages.
    """
    if split.is_trivial:
        return SplitStep(split, (step,))
    ways = split.data * split.parts
    notes: list[str] = []
    problems: list[str] = []
    if ways > 1:
        if step.batch % ways or not step.batch:
            raise UsageError(
                f"a batch of {step.batch} does not split into {split.data} replicas of {split.parts} "
                "micro-batches"
                if step.batch
                else "the batch of this step is unknown, so that it cannot be split",
                hint=f"Use a batch that is a multiple of {ways}.",
            )
        step = scale_batch(step, 1 / ways)
    if split.tensor > 1:
        step, found = tensor_parallel(step, split.tensor)
        problems += _uneven(step.shards, split.tensor) if step.shards else [_NOTHING_SPLIT]
        notes += _inferred(found, split.tensor)
    parts = stages(step, split.pipeline, split.parts) if split.pipeline > 1 else (step,)
    if split.pipeline > 1:
        problems += _unbalanced(parts)
    if split.data > 1:
        parts = tuple(_reduced(part, split) for part in parts)
    if split.gpus > MOST_LINKED and split.pipeline > 1:
        notes.append(
            f"Stages are taken to be linked like the GPUs of one machine, which are {MOST_LINKED} at most."
        )
    return SplitStep(split, parts, tuple(problems), tuple(notes))


def _uneven(shards: tuple[Shard, ...], ranks: int) -> list[str]:
    """A sentence for each size that the ranks do not share evenly."""
    said = []
    for shard in shards:
        if shard.what == "vocabulary":
            if shard.is_even:
                continue
            multiple = MEGATRON_VOCABULARY * ranks
            padded = -(-shard.size // multiple) * multiple
            said.append(
                f"a vocabulary of {shard.size} does not divide over {ranks} ranks: fill it up to {padded}, a "
                f"multiple of {ranks} x {MEGATRON_VOCABULARY}"
            )
        elif not shard.is_even:
            said.append(
                f"{shard.size} {shard.what} do not divide over {shard.ranks} ranks: the largest has "
                f"{shard.per_rank}, and frameworks refuse it"
            )
        elif shard.ranks < ranks:
            even = "" if ranks % shard.ranks == 0 else ", unevenly"
            said.append(
                f"{shard.size} {shard.what} for {ranks} ranks: each is held {ranks / shard.ranks:g} times"
                f"{even}"
            )
    return said


def _inferred(found: Roles, ranks: int) -> list[str]:
    blocks = [
        f"{counted(len(found.attention), 'attention block')} by heads" if found.attention else "",
        f"{counted(len(found.mlp), 'MLP')} by features" if found.mlp else "",
        "the vocabulary by tokens" if found.tables or found.heads else "",
    ]
    said = ", ".join(filter(None, blocks)) or "nothing"
    notes = [f"Sizes are those of one of {ranks} tensor-parallel ranks. Inferred from the step: {said}."]
    if found.whole:
        layers = pattern(layer.module for layer in found.whole)
        count = counted(len(found.whole), "linear layer")
        notes.append(f"Whole on every rank: {count}, {layers}.")
    return notes


def _unbalanced(parts: tuple[Step, ...]) -> list[str]:
    flop = [part.tensor_flop for part in parts]
    mean = sum(flop) / len(flop)
    if max(flop) <= 1.05 * mean:
        return []
    return [
        f"stage {flop.index(max(flop)) + 1} of {len(flop)} does {max(flop) / mean:.2f} times the arithmetic "
        "of the mean: the others wait for it"
    ]


def _reduced(step: Step, split: Split) -> Step:
    """With the sums of the gradients over the replicas: in buckets, each when the last of it is there."""
    trainable = {name: p for name, p in step.parameters.items() if p.trainable}
    backward = [i for i, entry in enumerate(step.ops) if entry.phase not in (FORWARD, OPTIMIZER)]
    if not step.settings.training or not trainable or not backward:
        return step
    last = {step.ops[i].site.module: i for i in backward}
    end = backward[-1]
    made = sorted((last.get(name.rpartition(".")[0], end), name) for name in trainable)
    near = max(1, min(split.data, MOST_LINKED // split.tensor))
    buckets: list[tuple[int, int, Exchange]] = []
    bytes_ = 0
    for place, name in made:
        parameter = trainable[name]
        bytes_ += prod(parameter.shape) * size_bytes(parameter.dtype)
        if bytes_ >= BUCKET_BYTES or name == made[-1][1]:
            exchange = Exchange(
                place, ALL_REDUCE, ALL_REDUCE, bytes_, split.data, near, Site(), parameter.dtype, "data"
            )
            buckets.append((place + 1, end + 1, replace(exchange, phase=BACKWARD_DATA)))
            bytes_ = 0
    program = replace(step.program, ranks=split.gpus, per_machine=min(split.gpus, MOST_LINKED))
    return replace(step, program=beside(program, buckets))
