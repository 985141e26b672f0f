"""What is chosen for a training on many GPUs: how they share it, and bytes of a parameter."""

from __future__ import annotations

from dataclasses import dataclass

from tilefit.options import Split
from tilefit.parallel.schedule import ONE_F_ONE_B

#: Choices of what the backward pass computes again: nothing; what lies between products and attention; all.
CHECKPOINTS = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class TrainingSplit(Split):
    """How many GPUs share a training step.

    Attributes:
        context: Ranks that share each sample's sequence.
        experts: Ranks of one stage that share the experts of each layer.
        zero: What the replicas share among them: 0 nothing, 1 the optimizer's state, 2 gradients too, 3
            parameters too (FSDP).
        reshard: FSDP frees what it has gathered of a layer behind its forward pass.
        samples: Of a micro-batch.
        chunks: Parts of the layers that each stage has.
        schedule: In which order stages run micro-batches: one of :mod:`tilefit.parallel.schedule`.
        checkpoint: One of :data:`CHECKPOINTS`.
        sums_each: Gradients are summed up behind every micro-batch, not behind the last alone (``no_sync``);
            None: with ZeRO-2 and FSDP outside of pipelines, which then hold a share of them only.
    """

    context: int = 1
    experts: int = 1
    zero: int = 0
    reshard: bool = True
    samples: int = 1
    chunks: int = 1
    schedule: str = ONE_F_ONE_B
    checkpoint: str = "none"
    sums_each: bool | None = None

    @property
    def gpus(self) -> int:
        """GPUs altogether."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.data * self.parts * self.samples

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters, but for those of experts."""
        return self.data * self.context

    def sums(self, part: int, parts: int) -> bool:
        """Whether gradients are summed up behind a micro-batch."""
        each = self.zero > 1 and self.pipeline == 1 if self.sums_each is None else self.sums_each
        return each or part == parts - 1

    def __str__(self) -> str:
        sizes = [(name, getattr(self, name)) for name in ("data", "tensor", "pipeline", "context", "experts")]
        said = [f"{name} {size}" for name, size in sizes if size > 1] or ["one GPU"]
        said += [("", "ZeRO-1", "ZeRO-2", "FSDP")[self.zero]] if self.zero else []
        said[-1] += " kept" if self.zero == 3 and not self.reshard else ""
        said.append(f"{self.parts} x {self.samples}")
        said += [f"{self.chunks} chunks"] if self.chunks > 1 else []
        said += [self.schedule] if self.schedule != ONE_F_ONE_B else []
        said += [f"{self.checkpoint} recompute"] if self.checkpoint != "none" else []
        return ", ".join(said)


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a parameter.

    Attributes:
        weight: In the model.
        work: As products read it.
        gradient: As it is kept and summed up.
        optimizer: State of the optimizer, with the fp32 copy where the weight is shorter.
        copies: Further copies of a gradient: in the weight's type, in buckets.
        master: Of the optimizer's state, the fp32 copy, which FSDP shards, and casts what it gathers.
    """

    weight: int = 2
    work: int = 2
    gradient: int = 4
    optimizer: float = 12
    copies: int = 0
    master: int = 0
