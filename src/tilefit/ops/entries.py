"""What a step is made of: its operations with their places, tensors and parameters, and how it was run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from tilefit.ops.base import Op
from tilefit.ops.dtypes import size_bytes

#: Values of :attr:`Fallback.reason`.
DIMENSIONS, MASK = "dimensions", "mask"


@dataclass(frozen=True, slots=True)
class Fallback:
    """A call that a library runs as several operations although it has one kernel for it.

    Attributes:
        number: Which call of the step.
        fused: What the one kernel would be, of attention forward.
        reason: What keeps the library from using it: :data:`DIMENSIONS` where its operands have more or fewer
            than 4, else the operand whose last dimension is not contiguous: ``query``, ``key``, ``value`` or
            :data:`MASK`. For an optimizer that was not asked to be fused its name, in lower case.
    """

    number: int
    fused: Op
    reason: str


@dataclass(frozen=True, slots=True)
class Site:
    """Where an operation comes from.

    Attributes:
        module: Path of the innermost module, such as ``transformer.h.3.mlp.c_fc``.
        source: Line of the user's (or the model's) code, such as ``model.py:41``.
        fallback: The call that it is one of several operations of, where one kernel would do.
    """

    module: str = ""
    source: str = ""
    fallback: Fallback | None = None


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor an operation reads or writes.

    Attributes:
        id: The same number for every view of the same memory within a step.
        shape: Sizes of this view.
        dtype: Element type.
        parameter: Name of the parameter this is, or is a lower-precision copy of; else empty.
        offset: Elements of the memory before this view's first.
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    parameter: str = ""
    offset: int = 0

    @property
    def elements(self) -> int:
        """Of this view."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of this view."""
        return self.elements * size_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class StepOp:
    """An operation at its place in a step.

    Attributes:
        op: What the hardware executes.
        phase: One of :data:`tilefit.ops.base.PHASES`.
        site: Where it comes from; a backward operation has the site of the forward one.
        name: The framework's name, such as ``aten.addmm``.
        inputs, outputs: The tensors it reads and writes.
        recomputed: It repeats a forward operation (activation checkpointing).
        replayed: It runs within a CUDA graph that the program captured and replays.
        eager: It runs by itself, though the model is compiled.
    """

    op: Op
    phase: str
    site: Site
    name: str = ""
    inputs: tuple[TensorRef, ...] = ()
    outputs: tuple[TensorRef, ...] = ()
    recomputed: bool = False
    replayed: bool = False
    eager: bool = False

    @property
    def parameter(self) -> str:
        """The first parameter among the inputs: the weight of a linear or convolution; else empty."""
        return next((ref.parameter for ref in self.inputs if ref.parameter), "")

    @property
    def function(self) -> str:
        """The name without its namespace and underscores around it, such as ``addmm``."""
        return self.name.rpartition(".")[2].strip("_")

    def is_weight_first(self, m: int, k: int, n: int) -> bool:
        """Whether a product of these sizes is ``weight @ x``, so that its columns are the rows of ``x``."""
        weights = [{*ref.shape[-2:]} for ref in self.inputs if ref.parameter and len(ref.shape) > 1]
        return {m, k} in weights and {k, n} not in weights

    def having(self, op: Op, inputs: tuple[TensorRef, ...], outputs: tuple[TensorRef, ...]) -> StepOp:
        """Another operation on other tensors, at this place and run in the same way."""
        how = self.recomputed, self.replayed, self.eager  # by hand: ``replace`` takes several times as long
        return StepOp(op, self.phase, self.site, self.name, inputs, outputs, *how)

    def shared(self, *shares: float) -> StepOp:
        """A rank's part of an optimizer's operation; ``shares`` as of :meth:`Op.shared`."""
        call = self.site.fallback
        call = call and replace(call, fused=call.fused.shared(*shares))
        return replace(self, op=self.op.shared(*shares), site=replace(self.site, fallback=call))


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model.

    Attributes:
        shape, dtype: As in the model.
        aliases: Other names of the same tensor (tied weights).
        trainable: It receives a gradient.
    """

    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()
    trainable: bool = True


@dataclass(frozen=True, slots=True)
class Settings:
    """How the step was run.

    Attributes:
        training: Forward, loss, backward and optimizer; otherwise forward alone.
        amp: Autocast element type, ``bf16`` or ``fp16``; empty without autocast.
        tf32: fp32 matrix products may use TF32.
        optimizer: ``adamw``, ``sgd``, another optimizer's lower-case name, or empty.
        fused_optimizer: One kernel per chunk of parameters (``fused=True``).
        channels_last: The model and its images are in NHWC.
        compiled: Fusion by ``torch.compile`` is modelled.
        cudnn_benchmark: cuDNN tries its algorithms and keeps the fastest.
        cuda_graph: The kernels of the model's parts are replayed from CUDA graphs.
        split: The forward pass reads a tensor's value, so that ``torch.compile`` makes several parts of it.
        recompiled: Layers that ``torch.compile`` compiles each for itself: those that fill a KV cache in a
            forward pass that is split.
    """

    training: bool = True
    amp: str = ""
    tf32: bool = False
    optimizer: str = ""
    fused_optimizer: bool = False
    channels_last: bool = False
    compiled: bool = False
    cudnn_benchmark: bool = False
    cuda_graph: bool = False
    split: bool = False
    recompiled: int = 0


@dataclass(frozen=True, slots=True)
class Shard:
    """How tensor parallelism divides one size of the model.

    Attributes:
        what: The size, such as ``query heads``.
        size: In the whole model.
        per_rank: On the rank with the most.
        ranks: How many ranks share it; fewer than there are where each part is held several times.
    """

    what: str
    size: int
    per_rank: int
    ranks: int

    @property
    def is_even(self) -> bool:
        """Every rank has as much."""
        return self.per_rank * self.ranks == self.size
