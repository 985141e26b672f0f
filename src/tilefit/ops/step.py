"""The step: every operation of one training step or one inference call, in order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from tilefit.errors import TilefitError
from tilefit.ops.attention import Attention
from tilefit.ops.base import Op
from tilefit.ops.collective import Collective
from tilefit.ops.conv import Conv
from tilefit.ops.gemm import Gemm
from tilefit.ops.peaks import Moment, fullest
from tilefit.ops.recurrent import Recurrent
from tilefit.ops.streaming import Streaming

_KINDS: dict[str, type[Op]] = {
    cls.kind: cls for cls in (Gemm, Conv, Attention, Recurrent, Streaming, Collective)
}

#: Values of :attr:`Fallback.reason`.
DIMENSIONS, MASK = "dimensions", "mask"
#: Version of the JSON form of a step.
STEP_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Fallback:
    """A call that a library runs as several operations although it has one kernel for it.

    Attributes:
        number: Which call of the step.
        fused: What the one kernel would be, forward.
        reason: What keeps the library from using it: :data:`DIMENSIONS` where its operands have more or fewer
            than 4, else the operand whose last dimension is not contiguous: ``query``, ``key``, ``value`` or
            :data:`MASK`.
    """

    number: int
    fused: Attention
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
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    parameter: str = ""


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
    """

    op: Op
    phase: str
    site: Site
    name: str = ""
    inputs: tuple[TensorRef, ...] = ()
    outputs: tuple[TensorRef, ...] = ()
    recomputed: bool = False

    @property
    def parameter(self) -> str:
        """The first parameter among the inputs: the weight of a linear or convolution; else empty."""
        return next((ref.parameter for ref in self.inputs if ref.parameter), "")


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
class Memory:
    """Bytes of GPU memory, by what they hold.

    Attributes:
        parameter_bytes, gradient_bytes, optimizer_bytes, buffer_bytes: Held between steps.
        saved_bytes: Activations kept for the backward pass.
        peak_bytes: The most that was alive at once, everything included; without the allocator's
            fragmentation, library workspaces and the CUDA context.
        moments: Of the moments that are the fullest on some batch, the bytes that stay whatever the batch
            (what is held by then, and what is made of parameters alone, such as autocast's copies of them),
            and those that grow with it. Empty where only the peak is known: then all that is not held
            between steps is taken to grow.
    """

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    buffer_bytes: int = 0
    saved_bytes: int = 0
    peak_bytes: int = 0
    moments: tuple[Moment, ...] = ()

    @property
    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the batch."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.buffer_bytes

    @property
    def activation_bytes(self) -> int:
        """Bytes at the peak that are not held between steps."""
        return max(0, self.peak_bytes - self.fixed_bytes)

    @property
    def constant_bytes(self) -> int:
        """Bytes that no batch is small enough to do without."""
        return max(stays for stays, _ in self._moments)

    def on_batch(self, factor: float) -> Memory:
        """What ``factor`` times the samples need."""
        return self._with(
            [(stays, round(grows * factor)) for stays, grows in self._moments],
            saved_bytes=round(self.saved_bytes * factor),
        )

    def part(self, held: float, activations: float) -> Memory:
        """What a GPU needs that holds a share of the parameters and makes a share of the activations."""
        of_held = {
            name: round(getattr(self, name) * held)
            for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
        }
        return self._with(
            [
                (self.buffer_bytes + round((stays - self.buffer_bytes) * held), round(grows * activations))
                for stays, grows in self._moments
            ],
            **of_held,
            saved_bytes=round(self.saved_bytes * activations),
        )

    def largest_batch(self, batch: int, capacity_bytes: float) -> int | None:
        """Samples that fit where this is of ``batch``: 0 if none does, None where nothing grows with it."""
        if self.constant_bytes > capacity_bytes:
            return 0
        return min(
            (int((capacity_bytes - stays) * batch / grows) for stays, grows in self._moments if grows),
            default=None,
        )

    @property
    def _moments(self) -> tuple[Moment, ...]:
        return self.moments or ((self.fixed_bytes, self.activation_bytes),)

    def _with(self, moments: Iterable[Moment], **held: int) -> Memory:
        found = fullest(moments)
        peak_bytes = max(stays + grows for stays, grows in found)
        return replace(self, **held, peak_bytes=peak_bytes, moments=found if self.moments else ())


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


@dataclass(frozen=True, slots=True)
class Step:
    """One captured training step or inference call.

    Attributes:
        ops: In the order in which the host launches them.
        memory: What it needs.
        settings: How it was run.
        inputs: Name, element type and shape of each input, as text (``input_ids: int64[16,1024]``).
        batch: Samples, where known; else 0.
        parameters: By qualified name.
        modules: Class name of each module, by path.
        model: What was captured, for headings.
        notes: What a reader must know about the capture (assumptions, things not seen).
        shards: Of one tensor-parallel rank's step, how sizes are divided; empty for a whole step.
    """

    ops: tuple[StepOp, ...]
    memory: Memory = field(default_factory=Memory)
    settings: Settings = field(default_factory=Settings)
    inputs: tuple[str, ...] = ()
    batch: int = 0
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    notes: tuple[str, ...] = ()
    shards: tuple[Shard, ...] = ()

    @property
    def flop(self) -> int:
        return sum(op.op.flop for op in self.ops)

    @property
    def tensor_flop(self) -> int:
        """Floating-point operations of matrix products, convolutions, attention and recurrence."""
        return sum(op.op.flop for op in self.ops if not isinstance(op.op, Streaming))

    @property
    def parameter_count(self) -> int:
        total = 0
        for parameter in self.parameters.values():
            size = 1
            for extent in parameter.shape:
                size *= extent
            total += size
        return total

    def to_json(self) -> str:
        """The step as JSON text, compact: sites and tensors are written once and referred to."""
        sites: dict[Site, int] = {}
        operations: dict[Op, int] = {}
        tensors: dict[TensorRef, int] = {}

        def number(table: dict[Any, int], key: Any) -> int:
            return table.setdefault(key, len(table))

        rows = [
            [
                number(operations, entry.op),
                entry.phase,
                number(sites, entry.site),
                entry.name,
                [number(tensors, ref) for ref in entry.inputs],
                [number(tensors, ref) for ref in entry.outputs],
                entry.recomputed,
            ]
            for entry in self.ops
        ]
        places = [
            [site.module, site.source]
            if (call := site.fallback) is None
            else [site.module, site.source, call.number, number(operations, call.fused), call.reason]
            for site in sites
        ]
        return json.dumps(
            {
                "schema": STEP_SCHEMA,
                "operations": [[op.kind, _values(op)] for op in operations],
                "sites": places,
                "tensors": [[ref.id, ref.shape, ref.dtype, ref.parameter] for ref in tensors],
                "rows": rows,
                "memory": asdict(self.memory),
                "settings": asdict(self.settings),
                "inputs": self.inputs,
                "batch": self.batch,
                "parameters": {
                    name: [p.shape, p.dtype, p.aliases, p.trainable] for name, p in self.parameters.items()
                },
                "modules": dict(self.modules),
                "model": self.model,
                "notes": self.notes,
                "shards": [asdict(shard) for shard in self.shards],
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Step:
        """The step that :meth:`to_json` wrote.

        Raises:
            TilefitError: the text is not such a step, or of another version.
        """
        try:
            data = json.loads(text)
            if data["schema"] != STEP_SCHEMA:
                raise TilefitError(f"a step of schema {data['schema']}, this version reads {STEP_SCHEMA}")
            operations = [_KINDS[kind](*_tuples(values)) for kind, values in data["operations"]]
            sites = [_site(operations, *values) for values in data["sites"]]
            tensors = [TensorRef(*_tuples(values)) for values in data["tensors"]]
            return cls(
                ops=tuple(
                    StepOp(
                        operations[op],
                        phase,
                        sites[site],
                        name,
                        tuple(tensors[i] for i in inputs),
                        tuple(tensors[i] for i in outputs),
                        recomputed,
                    )
                    for op, phase, site, name, inputs, outputs, recomputed in data["rows"]
                ),
                memory=_memory(**data["memory"]),
                settings=Settings(**data["settings"]),
                inputs=tuple(data["inputs"]),
                batch=data["batch"],
                parameters={name: Parameter(*_tuples(v)) for name, v in data["parameters"].items()},
                modules=data["modules"],
                model=data["model"],
                notes=tuple(data["notes"]),
                shards=tuple(Shard(**shard) for shard in data.get("shards", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TilefitError(f"not a captured step: {error!r}") from error


def _site(operations: list[Op], module: str, source: str, *call: Any) -> Site:
    if not call:
        return Site(module, source)
    number, op, reason = call
    return Site(module, source, Fallback(number, operations[op], reason))


def _memory(moments: Iterable[Iterable[int]] = (), **held: int) -> Memory:
    return Memory(**held, moments=tuple((stays, grows) for stays, grows in moments))


def _values(op: Op) -> list[Any]:
    return [getattr(op, f.name) for f in fields(op)]  # type: ignore[arg-type]


def _tuples(values: Iterable[Any]) -> list[Any]:
    return [tuple(value) if isinstance(value, list) else value for value in values]
