"""From an operation in a trace to the operation the hardware sees.

The profiler records the sizes, strides, element types and plain values of an operation's arguments. With them
the operation is called again, on ``meta`` tensors, under the recorder that captures steps: what describes a
captured operation describes a profiled one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from typing import Any

import torch

from tilefit.capture import aten
from tilefit.capture.dtypes import DTYPES
from tilefit.capture.recorder import Recorder
from tilefit.capture.sites import SiteTracker
from tilefit.ops import (
    BACKWARD_DATA,
    BACKWARD_WEIGHT,
    FORWARD,
    OPTIMIZER,
    Gemm,
    Op,
    Recurrent,
    Site,
    StepOp,
    Streaming,
    TensorRef,
)
from tilefit.ops.dtypes import size_bytes
from tilefit.profiling.attribution import BACKWARD, Call
from tilefit.profiling.kernel_names import read_name
from tilefit.profiling.trace import COPY, FILL, Kernel, Shapes

#: Element types in the words of the profiler (``caffe2::TypeMeta::name``).
_TYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::Half": torch.float16,
    "c10::BFloat16": torch.bfloat16,
    "c10::Float8_e4m3fn": torch.float8_e4m3fn,
    "c10::Float8_e5m2": torch.float8_e5m2,
    "c10::complex<float>": torch.complex64,
    "c10::complex<double>": torch.complex128,
    "long": torch.int64,
    "long int": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "short int": torch.int16,
    "signed char": torch.int8,
    "unsigned char": torch.uint8,
    "bool": torch.bool,
}
#: Element types by their number in ``c10::ScalarType``.
_FIRST_SCALAR_TYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_SCALAR_TYPES = {
    **dict(enumerate(getattr(torch, name) for name in _FIRST_SCALAR_TYPES)),
    9: torch.complex64,
    10: torch.complex128,
    11: torch.bool,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
}
_MEMORY_FORMATS = {
    0: torch.contiguous_format,
    1: torch.preserve_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
}
_ATTENTION = re.compile(r"_?scaled_dot_product_\w*?attention(?:_for_\w+?)?(_backward)?$")
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmv", "aten::mv")
_CELLS = ("RNN_RELU", "RNN_TANH", "LSTM", "GRU")
#: What a call on meta tensors may raise where the record of the arguments is not enough.
_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError, AssertionError)


@dataclass(slots=True, eq=False)
class Unit:
    """One operation of a profiled step with the kernels that ran for it.

    Attributes:
        op: What the hardware executed; one without bytes where nothing is known.
        phase: One of :data:`tilefit.ops.PHASES`.
        function: The name it is matched by, the same for captured and profiled operations.
        call: The call in the trace.
        kernels: What ran on the GPU for it.
        inputs, outputs: The tensors, as far as known; numbers mean nothing beyond this operation.
        known: The arguments were recorded, so ``op`` can be trusted.
    """

    op: Op
    phase: str
    function: str
    call: Call
    kernels: list[Kernel]
    inputs: tuple[TensorRef, ...] = ()
    outputs: tuple[TensorRef, ...] = ()
    known: bool = False

    @property
    def duration_ns(self) -> int:
        """Time of its kernels."""
        return sum(kernel.duration_ns for kernel in self.kernels)


def matching_name(name: str) -> str:
    """What captured (``aten.add_``) and profiled (``aten::add``) names of one function have in common."""
    function = aten.function_of(name.replace("::", ".")).removeprefix("_").removeprefix("fused_")
    attention = _ATTENTION.match(function)
    if attention:
        return f"attention{attention[1] or ''}"
    if function in ("lstm", "gru", "rnn_tanh", "rnn_relu", "cudnn_rnn"):
        return "recurrent"
    if function == "cudnn_rnn_backward" or re.match(r"(lstm|gru|rnn_\w+)_backward$", function):
        return "recurrent_backward"
    return function


class Operations:
    """Describes the operations of a trace; equal calls are worked out once.

    Args:
        tf32_matmul, tf32_conv: fp32 products ran in TF32.
    """

    def __init__(self, *, tf32_matmul: bool = False, tf32_conv: bool = True) -> None:
        sites = SiteTracker(lambda prefix, model: None, lambda: None)
        self._recorder = Recorder(sites, "meta", tf32_matmul=tf32_matmul, tf32_conv=tf32_conv)
        self._known: dict[tuple[str, int], tuple[StepOp, ...]] = {}

    def units(self, call: Call) -> list[Unit]:
        """The operations of a call, each with its kernels."""
        described = self._described(call)
        if not described:
            return [Unit(_unknown(call), _phase(call), _function(call), call, call.kernels)]
        parts = _shared_out(call.kernels, described)
        return [_known(call, entry, of) for entry, of in zip(described, parts, strict=True) if of]

    def _described(self, call: Call) -> tuple[StepOp, ...]:
        if call.shapes is None:
            return ()
        key = (call.name, id(call.shapes))
        if key not in self._known:
            self._known[key] = self._call_again(call.name, call.shapes)
        return self._known[key]

    def _call_again(self, name: str, shapes: Shapes) -> tuple[StepOp, ...]:
        if name.startswith("triton_"):
            return (_generated(name, shapes),)
        namespace, _, base = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), base, None) if base else None
        if packet is None:
            return ()
        for overload in packet.overloads():
            function = getattr(packet, overload)
            try:
                args, kwargs = _arguments(function._schema, shapes)
                again = aten.Call(function, args, kwargs, ())
                if _ATTENTION.match(base):
                    return (_attention(again),)
                if base in ("_cudnn_rnn", "_cudnn_rnn_backward"):
                    return (_recurrent(again),)
                self._recorder.ops = []
                with torch.no_grad(), self._recorder:
                    function(*args, **kwargs)
            except _FAILURES:
                continue  # another overload, or one that cannot be told from its record
            return tuple(self._recorder.ops)
        return ()


def _known(call: Call, entry: StepOp, kernels: list[Kernel]) -> Unit:
    """What a call did, as it was described, with the kernels that ran for it."""
    op, name = _with_role(entry.op, call.phase), matching_name(entry.name or call.name)
    return Unit(op, _phase(call, entry), name, call, kernels, entry.inputs, entry.outputs, True)


def renumbered(unit: Unit, numbers: count[int]) -> tuple[tuple[TensorRef, ...], tuple[TensorRef, ...]]:
    """A unit's tensors under numbers that no other operation uses."""
    new: dict[int, int] = {}

    def fresh(ref: TensorRef) -> TensorRef:
        if ref.id not in new:
            new[ref.id] = next(numbers)
        return TensorRef(new[ref.id], ref.shape, ref.dtype, ref.parameter, ref.offset)

    return tuple(map(fresh, unit.inputs)), tuple(map(fresh, unit.outputs))


# ---- arguments ---------------------------------------------------------------------------------


def _arguments(schema: Any, shapes: Shapes) -> tuple[list[Any], dict[str, Any]]:
    """The call's arguments on meta tensors.

    Raises:
        ValueError: the record is not one of a call with this schema.
    """
    if len(schema.arguments) != len(shapes.dims):
        raise ValueError("another number of arguments")
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for index, argument in enumerate(schema.arguments):
        value = _argument(str(argument.type), shapes, index)
        if argument.kwarg_only:
            if value is not None:
                kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _argument(kind: str, shapes: Shapes, index: int) -> Any:
    dims = shapes.dims[index]
    type_ = shapes.types[index] if index < len(shapes.types) else ""
    strides = shapes.strides[index] if index < len(shapes.strides) else []
    text = shapes.values[index] if index < len(shapes.values) else ""
    bare = kind.removeprefix("Optional[").removesuffix("]")
    if bare == "Tensor":
        if type_ in _TYPES:
            return _tensor(dims, strides, _TYPES[type_])
        if kind != "Tensor":
            return None
        raise ValueError("no tensor")
    if kind.startswith("List[") and "Tensor" in kind:
        # Of the tensors of a list the element type is not recorded; nearly all are fp32 (optimizers).
        each_strides = strides if len(strides) == len(dims) else [[]] * len(dims)
        return [_tensor(d, s, torch.float32) for d, s in zip(dims, each_strides, strict=True)]
    if not isinstance(text, str) or text == "":
        if type_ in _TYPES and type_ not in ("int", "long", "double", "bool", "float"):
            raise ValueError("a tensor where none is expected")
        return None
    value = _literal(text)
    if bare == "ScalarType" or "dtype" in bare:
        return _SCALAR_TYPES[value]
    if bare == "MemoryFormat":
        return _MEMORY_FORMATS[value]
    if bare in ("Layout", "Device", "Generator"):
        return None
    return value


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except SyntaxError:
        return float(text) if text.strip("-+") in ("inf", "nan") else text


def _tensor(dims: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if len(strides) != len(dims):
        return torch.empty(dims, dtype=dtype, device="meta")
    return torch.empty_strided(dims, strides, dtype=dtype, device="meta")


# ---- what the recorder does not see as CUDA runs it ------------------------------------------------


def _attention(call: aten.Call) -> StepOp:
    q, k, v = map(call.named, ("query", "key", "value"))
    given = {"is_causal": bool(call.named("is_causal")), "dropout_p": float(call.named("dropout_p") or 0.0)}
    op = aten.attention_of(q, k, v, direction=_direction(call), **given)
    return _entry(op, call, (q, k, v))


def _recurrent(call: aten.Call) -> StepOp:
    x = call.named("input")
    length, batch = (x.shape[1], x.shape[0]) if call.named("batch_first") else (x.shape[0], x.shape[1])
    op = Recurrent(
        mode=_CELLS[call.named("mode")],
        input_size=x.shape[2],
        hidden_size=call.named("hidden_size"),
        seq_len=length,
        batch=batch,
        num_layers=call.named("num_layers"),
        bidirectional=call.named("bidirectional"),
        dtype=DTYPES[x.dtype],
        direction=_direction(call),
    )
    return _entry(op, call, (x,))


def _direction(call: aten.Call) -> str:
    return BACKWARD_DATA if call.name.endswith("_backward") else FORWARD


def _entry(op: Op, call: aten.Call, tensors: Sequence[torch.Tensor]) -> StepOp:
    refs = tuple(TensorRef(i, tuple(t.shape), DTYPES[t.dtype]) for i, t in enumerate(tensors))
    return StepOp(op, "", Site(), call.name, refs)


def _generated(name: str, shapes: Shapes) -> StepOp:
    """A kernel that Inductor generated: it reads or writes each of its arguments once."""
    arguments = zip(shapes.dims, shapes.types, strict=False)
    elements = [(prod(dims), DTYPES[_TYPES[kind]]) for dims, kind in arguments if kind in _TYPES and dims]
    moved = [number * size_bytes(dtype) for number, dtype in elements]
    largest = max(elements, default=(0, "fp32"))
    op = Streaming("pointwise", largest[0], sum(moved[:-1]), sum(moved[-1:]), largest[1])
    return StepOp(op, "", Site(), name)


def _unknown(call: Call) -> Op:
    """An operation of which the trace has no arguments: copies and fills at least say how many bytes."""
    role = "other"
    read = written = 0
    for kernel in call.kernels:
        if kernel.kind in (COPY, FILL):
            role = "copy"
            read += kernel.moved_bytes if kernel.kind == COPY else 0
            written += kernel.moved_bytes
        elif read_name(kernel.name).communication:
            role = "collective"
    if role == "other" and call.phase == OPTIMIZER:
        role = "optimizer"
    return Streaming(role, 0, read, written, kernels=len(call.kernels), function=_function(call))


def _function(call: Call) -> str:
    return matching_name(call.name) if "::" in call.name else call.name


# ---- phases and kernels ------------------------------------------------------------------------


def _phase(call: Call, entry: StepOp | None = None) -> str:
    """Which gradient an operation of the backward pass computes.

    The data gradient of a product C[m, n] contracts n, the weight gradient m; where these are equal, the
    weight gradient is the one that multiplies by the input transposed. Products of two activations have data
    gradients alone, as in a captured step.
    """
    if call.phase != BACKWARD:
        return call.phase
    if entry is None:
        return BACKWARD_DATA
    if entry.phase == BACKWARD_WEIGHT:
        return BACKWARD_WEIGHT
    op = entry.op
    if not isinstance(op, Gemm) or call.name not in _PRODUCTS:
        return BACKWARD_DATA
    matrices = [dims for dims in call.forward.dims if len(dims) == 2] if call.forward else []
    m, n = (matrices[-2][0], matrices[-1][1]) if len(matrices) >= 2 else (0, 0)
    is_weight = op.k == m if m != n and op.k in (m, n) else op.layout[1] == "T"
    return BACKWARD_WEIGHT if is_weight else BACKWARD_DATA


def _with_role(op: Op, phase: str) -> Op:
    if phase == OPTIMIZER and isinstance(op, Streaming) and op.role == "pointwise":
        return replace(op, role="optimizer")
    return op


def _shared_out(kernels: list[Kernel], described: Sequence[StepOp]) -> list[list[Kernel]]:
    """The kernels of each operation of a call: a convolution's two gradients run in one call.

    Kernels say in their names which gradient they compute; what says nothing (a conversion of the layout, a
    reduction) belongs to the next one that does. Without a word from any, the kernels are dealt in order.
    """
    if len(described) == 1:
        return [kernels]
    parts: list[list[Kernel]] = [[] for _ in described]
    of_phase = {entry.phase: number for number, entry in reversed(list(enumerate(described)))}
    words = {"dgrad": BACKWARD_DATA, "wgrad": BACKWARD_WEIGHT}
    pending: list[Kernel] = []
    target: int | None = None
    for kernel in kernels:
        low = kernel.name.lower()
        said = next((of_phase[p] for word, p in words.items() if word in low and p in of_phase), None)
        pending.append(kernel)
        if said is not None:
            target = said
            parts[said] += pending
            pending = []
    if target is None:
        for number, kernel in enumerate(kernels):
            parts[min(number, len(parts) - 1)].append(kernel)
        return parts
    # What follows the last product: the sum for a bias, if there is one to make.
    last = len(parts) - 1 if described[-1].op.kind == "streaming" else target
    parts[last] += pending
    return parts
