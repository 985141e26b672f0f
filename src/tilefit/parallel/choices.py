"""What is chosen for a training on many GPUs: how they share it, and bytes of a parameter."""

from __future__ import annotations

from dataclasses import dataclass

from tilefit.options import Split

#: Choices of what the backward pass computes again: nothing; what lies between products and attention; all.
CHECKPOINTS = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class TrainingSplit(Split):
    """How many GPUs share a training step.

    Attributes:
        context: Ranks that share each sample's sequence.
        zero: What the replicas share among them: 0 nothing, 1 the optimizer's state, 2 gradients too, 3
            parameters too (FSDP).
        samples: Of a micro-batch.
        chunks: Parts of the layers that each stage has (interleaved 1F1B); 1: one (1F1B).
        checkpoint: One of :data:`CHECKPOINTS`.
        gpipe: A pipeline runs all forward passes first (GPipe).
        sums_each: Gradients are summed up behind every micro-batch, not behind the last alone (``no_sync``);
            None: with FSDP, which then holds a share of them only.
    """

    context: int = 1
    zero: int = 0
    samples: int = 1
    chunks: int = 1
    checkpoint: str = "none"
    gpipe: bool = False
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
        """Ranks that hold the same parameters."""
        return self.data * self.context

    def sums(self, part: int, parts: int) -> bool:
        """Whether gradients are summed up behind a micro-batch."""
        each = self.zero > 1 if self.sums_each is None else self.sums_each
        return self.replicas > 1 and (each or part == parts - 1)

    def __str__(self) -> str:
        sizes = [(name, getattr(self, name)) for name in ("data", "tensor", "pipeline", "context")]
        said = [f"{name} {size}" for name, size in sizes if size > 1] or ["one GPU"]
        said += [("", "ZeRO-1", "ZeRO-2", "FSDP")[self.zero]] if self.zero else []
        said.append(f"{self.parts} x {self.samples}")
        said += [f"{self.chunks} chunks"] if self.chunks > 1 else []
        said += ["GPipe"] if self.gpipe else []
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
