"""What each ATen operation costs: the table from PyTorch's operations to tilefit's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, Protocol

import torch

from tilefit.capture.dtypes import DTYPES, product_dtype
from tilefit.capture.layouts import common_run, innermost, is_channels_last, touched_bytes, transposes
from tilefit.capture.trees import tensors
from tilefit.emulation.values import Schema
from tilefit.errors import CaptureError
from tilefit.ops import (
    BACKWARD_DATA,
    BACKWARD_WEIGHT,
    FORWARD,
    OPTIMIZER,
    Attention,
    Conv,
    Gemm,
    Op,
    Streaming,
)
from tilefit.ops.operations import NAMED, by_name
from tilefit.ops.streaming import CONTIGUOUS, JOINED_ALONE, multi_tensor_launches

#: An operation, its phase (empty: whatever autograd's state implies), what it reads and what it writes.
Described = tuple[Op, str, Sequence[torch.Tensor], Sequence[torch.Tensor]]


class Recording(Protocol):
    """What the description of a call depends on beside the call."""

    device: str
    tf32_matmul: bool
    tf32_conv: bool
    #: The phase that was set; empty where autograd's state decides.
    current_phase: str

    def identify(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's memory."""

    def gradient_phase(self, operands: Iterable[torch.Tensor]) -> str:
        """Whether a product in the backward pass is a data or a weight gradient; empty outside of it."""


class Call:
    """One dispatched operation with its tensors at hand."""

    def __init__(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.out = out
        self.name = f"{func.namespace}.{func._overloadpacket.__name__}"
        self.packet = func._overloadpacket.__name__
        outs = {argument.name for argument in func._schema.arguments if argument.is_out} if kwargs else ()
        self.inputs = list(tensors((args, [value for name, value in kwargs.items() if name not in outs])))
        self.outputs = list(tensors(out))

    @property
    def mutated(self) -> list[torch.Tensor]:
        """The tensors that it writes into beside those of ``out``, which it returns."""
        return list(Schema.of(self.func).written(self.args, {}))

    def named(self, name: str) -> Any:
        """An argument by its name in the schema; None if the operation has none of that name."""
        for index, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                default = argument.default_value if argument.has_default_value() else None
                return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)
        return None


@cache
def is_free(func: Any) -> bool:
    """Whether an operation only makes a view or allocates; collectives are told apart."""
    if func._overloadpacket.__name__ in NAMED["kernels"]["none"] or func.namespace == "_c10d_functional":
        return True
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


@cache
def makes_new_tensors(func: Any) -> bool:
    """Whether an operation neither writes into its arguments nor returns views of them."""
    schema = func._schema
    return bool(schema.returns) and not any(
        a.alias_info is not None for a in (*schema.arguments, *schema.returns)
    )


@cache
def writes_first_alone(func: Any) -> bool:
    """Whether an operation only writes values into its first argument, and returns that or nothing."""
    schema = func._schema
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    return (
        written[:1] == [True]
        and not any(written[1:])
        and all(r.alias_info is not None for r in schema.returns)
        and torch.Tag.inplace_view not in func.tags
    )


_SAME_KERNELS = by_name("same_kernels")


@cache
def function_of(name: str) -> str:
    """What :attr:`tilefit.ops.Streaming.function` calls an operation: ``aten.add_`` is ``add``."""
    function = name.removeprefix("aten.").rstrip("_")
    return _SAME_KERNELS.get(function, function)


_Handler = Callable[[Call, Recording], list[Described]]
_HANDLERS: dict[str, _Handler] = {}


def _describes(names: str) -> Callable[[_Handler], _Handler]:
    """Make a function describe the operations of these names."""

    def register(handler: _Handler) -> _Handler:
        _HANDLERS.update(dict.fromkeys(names.split(), handler))
        return handler

    return register


def describe(call: Call, recorder: Recording) -> list[Described]:
    """The operations the hardware executes for a call."""
    handler = _foreach if call.packet.startswith("_foreach") else _HANDLERS.get(call.packet)
    described = handler(call, recorder) if handler else _streaming(call, recorder, _role(call.func))
    return [*_packed(call, recorder), *described] if call.packet in NAMED["kernels"]["packed"] else described


def _packed(call: Call, recorder: Recording) -> Iterator[Described]:
    """The copies of operands that do not lie as a kernel takes them."""
    for tensor in call.inputs:
        if not tensor.is_contiguous():
            packed = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            op, phase, read, _ = _stream(recorder, "copy", (tensor,), (packed,), function=CONTIGUOUS)
            yield op, phase, read, ()


# ---- matrix products ---------------------------------------------------------------------------


def _orientation(matrix: torch.Tensor) -> tuple[str, int]:
    """``N`` (rows contiguous) or ``T`` (columns contiguous) and the leading dimension if not packed."""
    rows, columns = matrix.shape[-2], matrix.shape[-1]
    row_stride, column_stride = matrix.stride(-2), matrix.stride(-1)
    if column_stride == 1 or columns == 1:
        return "N", 0 if row_stride == columns or rows == 1 or row_stride < columns else row_stride
    if row_stride == 1 or rows == 1:
        return "T", 0 if column_stride == rows or column_stride < rows else column_stride
    return "N", 0  # copied before the product


def gemm_of(
    a: torch.Tensor, b: torch.Tensor, recorder: Recording, *, bias: bool = False, out: str = ""
) -> Gemm:
    """The product of two matrices (or batches of them) as they lie in memory."""
    letter_a, ld_a = _orientation(a)
    letter_b, ld_b = _orientation(b)
    return Gemm(
        m=max(1, a.shape[-2]),
        n=max(1, b.shape[-1]),
        k=max(1, a.shape[-1]),
        dtype=product_dtype(a.dtype, recorder.tf32_matmul),
        layout=letter_b + letter_a,
        batch=max(1, prod(a.shape[:-2])),
        out_dtype=out,
        ld_a=ld_a,
        ld_b=ld_b,
        bias=bias,
        same_b=b.dim() > 2 and b.shape[0] > 1 and not any(b.stride()[:-2]),
    )


def attention_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any) -> Attention:
    """The attention of [batch, heads, length, width] (or of other dimensions before the last two); ``given``
    are fields of it."""
    *batch, seq_len, head_dim = query.shape
    sizes = {
        "batch": batch[0] if batch else 1,
        "num_heads": prod(batch[1:]),
        "seq_len": seq_len,
        "head_dim": head_dim,
        "kv_len": key.shape[-2],
        "num_kv_heads": key.shape[1] if query.dim() == key.dim() == 4 else 0,
        "value_dim": value.shape[-1],
        "dtype": DTYPES[query.dtype],
    }
    return Attention(**{**sizes, **given})


def check_alike(what: str, operands: Iterable[torch.Tensor]) -> None:
    """Refuse operands that no kernel of CUDA multiplies; those of shapes alone take any.

    Raises:
        CaptureError: they are of several element types, or of integers.
    """
    dtypes = list(dict.fromkeys(t.dtype for t in operands))
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    if len(dtypes) > 1:
        raise CaptureError(
            f"{what} of {' and '.join(names)} cannot run: CUDA multiplies operands of one element type",
            hint='Give inputs of the model\'s type (--input "x: float16[…]"), or use autocast: --amp.',
        )
    if not (dtypes[0].is_floating_point or dtypes[0].is_complex):
        raise CaptureError(
            f"{what} of {names[0]} cannot run: CUDA has none for it",
            hint="Check the element types of the inputs (--input).",
        )


@_describes("mm bmm addmm addmm_ baddbmm baddbmm_ addbmm _addmm_activation _int_mm")
def _product(call: Call, recorder: Recording) -> list[Described]:
    a, b, others = _operands(call)
    if call.packet != "_int_mm":
        check_alike("a matrix product", (a, b))
    op = gemm_of(a, b, recorder, bias="addmm" in call.packet)
    return [(op, recorder.gradient_phase((a, b)), (a, b, *others), call.outputs)]


@_describes("mv addmv dot vdot")
def _vector_product(call: Call, recorder: Recording) -> list[Described]:
    a, b, others = _operands(call)
    matrix = a if a.dim() == 2 else a.unsqueeze(0)  # a dot product has two vectors
    op = gemm_of(matrix, b.unsqueeze(1), recorder)
    return [(op, recorder.gradient_phase((a, b)), (a, b, *others), call.outputs)]


def _operands(call: Call) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The two that are multiplied, and what is added to their product."""
    a, b = list(tensors(call.args))[-2:]
    return a, b, [t for t in call.inputs if t is not a and t is not b]


@_describes("_scaled_mm")
def _scaled_mm(call: Call, recorder: Recording) -> list[Described]:
    a, b = call.args[0], call.args[1]
    op = gemm_of(a, b, recorder, out=DTYPES[call.outputs[0].dtype])
    return [(op, recorder.gradient_phase((a, b)), call.inputs, call.outputs)]


@_describes("_grouped_mm")
def _grouped_mm(call: Call, recorder: Recording) -> list[Described]:
    """Rows shared out over experts: taken to be even, which is what a balanced router aims for."""
    a, b = call.args[0], call.args[1]
    if a.dim() == 2 and b.dim() == 3:
        groups = b.shape[0]
        a = a.new_empty((groups, max(1, a.shape[0] // groups), a.shape[1]))
    elif a.dim() == 2 and b.dim() == 2:
        offsets = call.named("offs")
        groups = offsets.shape[0]
        rows = max(1, a.shape[1] // groups)
        a = a.new_empty((groups, rows, a.shape[0])).transpose(1, 2)
        b = b.new_empty((groups, rows, b.shape[1]))
    phase = recorder.gradient_phase(call.args[:2])
    return [(gemm_of(a, b, recorder), phase, call.inputs, call.outputs)]


# ---- convolutions ------------------------------------------------------------------------------


def _conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    settings: Sequence[Any],
    recorder: Recording,
    pass_: str,
) -> Conv:
    """``settings`` are stride, padding, dilation, transposed, output_padding, groups, as ATen passes them."""
    stride, padding, dilation, transposed, _, groups = settings
    dims = weight.dim() - 2
    if transposed:
        # A transposed convolution is the data gradient of the convolution from its output to its input.
        swap = {FORWARD: BACKWARD_DATA, BACKWARD_DATA: FORWARD, BACKWARD_WEIGHT: BACKWARD_WEIGHT}
        x, y, pass_ = y, x, swap[pass_]

    def of_each(value: Sequence[int]) -> tuple[int, ...]:
        return tuple(value) * dims if len(value) == 1 else tuple(value)

    return Conv(
        batch=x.shape[0] if x.dim() == dims + 2 else 1,
        in_channels=x.shape[-dims - 1],
        out_channels=y.shape[-dims - 1],
        input_size=tuple(x.shape[-dims:]),
        kernel_size=tuple(weight.shape[2:]),
        stride=of_each(stride),
        padding=of_each(padding),
        dilation=of_each(dilation),
        groups=groups,
        dtype=product_dtype(weight.dtype, recorder.tf32_conv),
        channels_last=is_channels_last(x) or is_channels_last(weight),
        direction=pass_,
    )


@_describes("convolution convolution_overrideable")
def _convolution(call: Call, recorder: Recording) -> list[Described]:
    x, weight = call.args[0], call.args[1]
    op = _conv(x, weight, call.outputs[0], call.args[3:9], recorder, FORWARD)
    op = replace(op, bias=call.args[2] is not None)
    return [(op, "", call.inputs, call.outputs)]


@_describes("convolution_backward")
def _convolution_backward(call: Call, recorder: Recording) -> list[Described]:
    grad, x, weight = call.args[:3]
    settings, mask = call.args[4:10], call.args[10]
    grad_x, grad_weight, grad_bias = call.out
    ops: list[Described] = []
    if mask[0]:
        op = _conv(x, weight, grad, settings, recorder, BACKWARD_DATA)
        ops.append((op, BACKWARD_DATA, (grad, weight), (grad_x,)))
    if mask[1]:
        op = _conv(x, weight, grad, settings, recorder, BACKWARD_WEIGHT)
        ops.append((op, BACKWARD_WEIGHT, (grad, x), (grad_weight,)))
    if mask[2]:
        # Whether channels lie next to each other, also those of single pixels.
        across, passed = grad.stride(1) == 1, BACKWARD_WEIGHT
        ops.append(_stream(recorder, "reduction", (grad,), (grad_bias,), phase=passed, strided=across))
    return ops


# ---- everything that streams memory ------------------------------------------------------------


def _distinct(tensors: Sequence[torch.Tensor], recorder: Recording) -> list[torch.Tensor]:
    seen: set[tuple[int, tuple[int, ...], int]] = set()
    distinct = []
    for tensor in tensors:
        key = (recorder.identify(tensor), tuple(tensor.shape), int(tensor.storage_offset()))
        if key not in seen:
            seen.add(key)
            distinct.append(tensor)
    return distinct


def streaming_of(
    role: str, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor], **fields: Any
) -> Streaming:
    """The operation that streams these tensors; ``fields`` of it say what is otherwise about it."""
    largest = max((*read, *written), key=lambda t: t.numel(), default=None)
    seen = {
        "elements": largest.numel() if largest is not None else 0,
        "read_bytes": sum(map(touched_bytes, read)),
        "write_bytes": sum(map(touched_bytes, written)),
        "dtype": DTYPES.get(largest.dtype, "fp32") if largest is not None else "fp32",
    }
    return Streaming(role, **{**seen, **fields})


def _stream(
    recorder: Recording,
    role: str,
    reads: Sequence[torch.Tensor],
    writes: Sequence[torch.Tensor],
    *,
    phase: str = "",
    strided: bool | None = None,
    **fields: Any,
) -> Described:
    """:func:`streaming_of` what is not the same tensor again; where nothing else is said, as operands and
    results lie in memory."""
    read = _distinct(reads, recorder)
    written = _distinct(writes, recorder)
    if strided is None:
        strided = role in ("copy", "pointwise") and transposes(read, written)
    if not fields.get("inner") and role in ("copy", "pointwise") and written:
        fields["inner"] = common_run(read, written[0])
    return streaming_of(role, read, written, strided=strided, **fields), phase, reads, written


def _streamed(call: Call, recorder: Recording, role: str, phase: str = "", **fields: Any) -> list[Described]:
    return [_stream(recorder, role, call.inputs, call.outputs, phase=phase, **fields)]


def _streaming(call: Call, recorder: Recording, role: str, **fields: Any) -> list[Described]:
    """The general case: every input is read and every output written, once."""
    written = call.outputs or call.mutated
    inner, strided = _reach(call, role, written) if call.inputs and written else (0, None)
    sizes = sorted(t.numel() for t in call.inputs) if call.packet == "cat" else []
    function = JOINED_ALONE if sizes[-2:-1] == [0] else ""
    fields = {"inner": inner, "strided": strided, "function": function, **fields}
    return [_stream(recorder, role, call.inputs, written, **fields)]


def _reach(call: Call, role: str, written: Sequence[torch.Tensor]) -> tuple[int, bool | None]:
    """How many elements a result depends on where they lie together in memory (else 0), and whether the
    operation runs across the contiguous dimension; None where the operands' layouts tell."""
    x = call.inputs[0]
    if call.packet == "cat":
        return 0, not all(t.is_contiguous() or is_channels_last(t) for t in call.inputs)
    if "ctc_loss" in call.packet:  # its steps follow each other
        return next(t.shape[0] for t in call.inputs if t.dim() == 3), False
    if role == "softmax":
        return _normalized(x, next((a for a in call.args[1:] if type(a) is int), -1))
    if role == "pooling":
        return 0, any(map(is_channels_last, call.inputs))
    if role == "normalization":
        if "batch_norm" in call.packet:
            channels = x.shape[1] if x.dim() > 1 else 1
            return x.numel() // max(1, channels), any(map(is_channels_last, call.inputs))
        if "group_norm" in call.packet:
            channels, pixels, groups = (call.named(n) for n in ("C", "HxW", "group"))
            return channels // groups * pixels, False
        shape = call.named("normalized_shape")
        return (prod(shape) if shape else 0), False
    if role == "reduction":
        dims = call.named("dim")
        if written[0].shape == x.shape and isinstance(dims, int):  # a running sum
            return int(x.shape[dims]), False
        if not isinstance(dims, (int, list, tuple)) or dims == [] or not x.dim():
            return 0, False
        reduced = {d % x.dim() for d in ([dims] if isinstance(dims, int) else dims)}
        if innermost(x) in reduced:
            return prod(x.shape[d] for d in reduced), False
        return 0, True
    return 0, None


def _normalized(x: torch.Tensor, dim: int) -> tuple[int, bool]:
    """What a softmax over a dimension takes together; 0 and across, where it is not the last."""
    if not x.dim():
        return 1, False
    return (int(x.shape[dim]), False) if dim % x.dim() == x.dim() - 1 else (0, True)


@_describes(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm"
)
def _batch_norm(call: Call, recorder: Recording) -> list[Described]:
    """With statistics that are given, as in inference, nothing is normalised together: one kernel makes
    factors of the variances, another scales and shifts, as ``batch_norm_elemt`` does."""
    given = {"inner": 0, "kernels": 2, "function": "batch_norm_elemt"} if not call.named("training") else {}
    return _streaming(call, recorder, "normalization", **given)


@_describes(
    """zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full zero_ fill_ fill arange rand
    randn randint randperm eye tril_indices triu_indices linspace"""
)
def _write_only(call: Call, recorder: Recording) -> list[Described]:
    """Fills: nothing is read."""
    return [_stream(recorder, "pointwise", (), call.outputs)]


@_describes("copy_")
def _copy_(call: Call, recorder: Recording) -> list[Described]:
    return [_stream(recorder, "copy", (call.args[1],), call.outputs)]


@_describes("embedding index index_select gather")
def _lookup(call: Call, recorder: Recording) -> list[Described]:
    """Of the first operand only as much is read as is written."""
    role = "embedding" if call.packet == "embedding" else "indexing"
    read_bytes = sum(map(touched_bytes, (*call.outputs, *_distinct(call.inputs[1:], recorder))))
    fields = _rows(call) or {"inner": _row_length(call)}
    return _streamed(call, recorder, role, **fields, read_bytes=read_bytes)


@_describes("_embedding_bag _embedding_bag_forward_only")
def _bags(call: Call, recorder: Recording) -> list[Described]:
    """Of the table only the rows are read that are looked up."""
    table, numbers, *others = _distinct(call.inputs, recorder)
    rows = numbers.numel() * prod(table.shape[1:]) * table.element_size()
    small = sum(map(touched_bytes, (numbers, *others)))
    read_bytes = min(rows, touched_bytes(table)) + small
    return _streamed(call, recorder, "indexing", **_rows(call), read_bytes=read_bytes)


@_describes("sparse_product")
def _sparse_product(call: Call, recorder: Recording) -> list[Described]:
    """A sparse matrix times a dense one: for each of its elements a row is read, and added to a sum. Elements
    have a value and a number, those in COO two, of which cuSPARSE makes such as in CSR."""
    dense, values = call.inputs
    fields: dict[str, Any] = {"inner": dense.shape[1], "picked": values.numel(), "table": dense.shape[0]}
    fields["read_bytes"] = values.numel() * (
        dense.shape[1] * dense.element_size() + values.element_size() + 8
    )
    return _streamed(call, recorder, "indexing", **fields, kernels=_SPARSE_KERNELS[call.args[3]])


@_describes("coalesced_values")
def _coalesced(call: Call, recorder: Recording) -> list[Described]:
    """The numbers of a sparse matrix's elements are sorted with their values."""
    values = call.inputs[0]
    moved = _SORTED_TIMES * values.numel() * (values.element_size() + 16)
    fields: dict[str, Any] = {"inner": 1, "picked": values.numel(), "table": values.numel()}
    fields |= {"read_bytes": moved, "write_bytes": moved, "kernels": _COALESCE_KERNELS}
    return _streamed(call, recorder, "sort", **fields)


#: Kernels of a product of a sparse matrix in COO and in CSR, and of what coalesces one (as seen on an H100).
_SPARSE_KERNELS, _COALESCE_KERNELS = {False: 10, True: 7}, 16
#: How often a sort reads and writes what it sorts, about.
_SORTED_TIMES = 4


def _rows(call: Call) -> dict[str, Any]:
    """Of a call that takes rows of a table by their numbers: elements of a row, rows, and those of the table;
    nothing of a call that takes single elements, or rows along another dimension or by a mask."""
    table, numbers = call.inputs[0], call.inputs[1:2]
    match call.packet.strip("_"):
        case "embedding" | "embedding_bag" | "embedding_bag_forward_only":
            pass
        case "embedding_dense_backward" | "embedding_bag_backward":
            table = call.outputs[0]
        case "index_select" | "index_add":
            if not table.dim() or call.named("dim") % table.dim():
                return {}
        case "gather" | "scatter_add":
            # Numbers that are the same along a row take it whole.
            each = call.inputs[1]
            whole = table.dim() > 1 and call.named("dim") == 0 and not any(each.stride()[1:])
            if whole:
                return {"inner": prod(each.shape[1:]), "picked": each.shape[0], "table": table.shape[0]}
            adds = call.packet.startswith("scatter")
            return {"inner": 1, "picked": each.numel(), "table": table.numel()} if adds else {}
        case "index" | "index_put" | "index_put_impl" | "unsafe_index_put":
            numbers = [each for each in call.args[1] if each is not None]
            several = len(numbers) > 1 and call.packet == "index"
            if several or any(each is None for each in call.args[1][: len(numbers)]):
                return {}
        case _:
            return {}
    if any(each.dtype in (torch.bool, torch.uint8) for each in numbers):
        return {}
    picked = prod(torch.broadcast_shapes(*(each.shape for each in numbers)))  # type: ignore[no-untyped-call]
    inner = prod(table.shape[len(numbers) :])
    return {"inner": inner, "picked": picked, "table": prod(table.shape[: len(numbers)])}


def _row_length(call: Call) -> int:
    """Elements that a lookup moves together."""
    x = call.inputs[0]
    match call.packet.rstrip("_"):
        case "index_select" | "index_add" | "index_copy":
            return prod(x.shape[call.named("dim") % x.dim() + 1 :]) if x.dim() else 1
        case "index":
            last = max((i for i, index in enumerate(call.args[1]) if index is not None), default=0)
            return prod(x.shape[last + 1 :])
    return 1


_UNSORTED_INDICES = 3072


@_describes("embedding_dense_backward")
def _embedding_backward(call: Call, recorder: Recording) -> list[Described]:
    # The table's gradient is zeroed and the rows added; more than a few indices are sorted first, by some
    # thirty small kernels (PyTorch, ATen/native/cuda/Embedding.cu; the number as profiled on an H200).
    grad, indices = call.inputs[0], call.inputs[1]
    table = call.outputs[0]
    rows = min(touched_bytes(grad), touched_bytes(table))
    return _streamed(
        call,
        recorder,
        "embedding",
        BACKWARD_WEIGHT,
        **_rows(call),
        read_bytes=sum(map(touched_bytes, call.inputs)) + rows,
        write_bytes=touched_bytes(table) + rows,
        kernels=2 if indices.numel() <= _UNSORTED_INDICES else 30,
    )


@_describes("scatter scatter_ scatter_add scatter_add_ index_add index_add_ index_copy index_copy_")
def _scatter(call: Call, recorder: Recording) -> list[Described]:
    """In-place or copying scatter: the indexed elements are read and written; a copy copies the rest too."""
    in_place = call.packet.endswith("_")
    moved = touched_bytes(call.inputs[-1])
    return _streamed(
        call,
        recorder,
        "indexing",
        **(_rows(call) or {"inner": _row_length(call)}),
        read_bytes=sum(map(touched_bytes, call.inputs[in_place:])),
        write_bytes=moved + (0 if in_place else touched_bytes(call.outputs[0])),
        kernels=1 if in_place else 2,
    )


@_describes(
    """index_put index_put_ _index_put_impl_ _unsafe_index_put _embedding_bag_backward
    _embedding_bag_dense_backward"""
)
def _sorted_first(call: Call, recorder: Recording) -> list[Described]:
    """What is added to rows that may be the same is sorted first, by many small kernels (their numbers as
    seen on an H200, ``benchmarks/program_ops.py``)."""
    many = _BAG_KERNELS if call.packet.startswith("_embedding") else _ADDING_KERNELS
    kernels = 1 if call.named("accumulate") is False else many
    return _streaming(call, recorder, "indexing", kernels=kernels, **_rows(call))


#: For the gradient of a table of bags, and for ``x[indices] += y`` with ``accumulate``.
_BAG_KERNELS, _ADDING_KERNELS = 22, 16


@_describes("nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward")
def _picked_loss(call: Call, recorder: Recording) -> list[Described]:
    """The negative log-likelihood reads one element a row; its gradient is zero but for that element."""
    scores, *small = call.inputs if call.packet.endswith("forward") else call.inputs[1:]
    others = sum(map(touched_bytes, small))
    if not call.packet.endswith("forward"):
        others += touched_bytes(call.inputs[0])
        return _streamed(call, recorder, "loss", read_bytes=others, kernels=2)
    picked = max(1, scores.numel() // max(1, scores.shape[1] if scores.dim() > 1 else scores.shape[0]))
    read_bytes = others + picked * scores.element_size()
    return _streamed(call, recorder, "loss", read_bytes=read_bytes, inner=scores.shape[-1])


@_describes("max_pool2d_with_indices_backward avg_pool2d_backward")
def _unpooled(call: Call, recorder: Recording) -> list[Described]:
    """Each element looks into the windows that it may lie in."""
    sizes = call.named("kernel_size")
    strides = call.named("stride") or sizes
    windows = prod(-(-size // stride) for size, stride in zip(sizes, strides, strict=True))
    return _streaming(call, recorder, "pooling", flop_per_element=float(windows))


@_describes("slice_backward select_backward")
def _slice_backward(call: Call, recorder: Recording) -> list[Described]:
    # Zeros of the full size, then a copy into the slice.
    piece, whole = call.inputs[0], call.outputs[0]
    if call.packet == "select_backward":
        piece = piece.unsqueeze(call.named("dim"))
    return _streamed(call, recorder, "copy", inner=common_run([piece], whole), kernels=2)


@_describes("_amp_foreach_non_finite_check_and_unscale_")
def _foreach(call: Call, recorder: Recording) -> list[Described]:
    """One multi-tensor operation over lists of tensors."""
    lists = [
        arg
        for arg in call.args
        if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], torch.Tensor)
    ]
    if not lists:
        return _streaming(call, recorder, "pointwise")
    read = [t for t in call.inputs if t.device.type == recorder.device]
    written = call.outputs or call.mutated
    if call.packet in ("_foreach_copy_", "_foreach_zero_"):
        read = [t for t in read if not any(t is w for w in written)]
    depth = min(5, len(lists) + (1 if call.outputs else 0))
    sizes = [t.numel() for t in lists[0]]
    elements, kernels = sum(sizes), multi_tensor_launches(sizes, depth)
    role = "optimizer" if recorder.current_phase == OPTIMIZER else "pointwise"
    op, phase, _, _ = _stream(recorder, role, read, written, kernels=kernels, elements=elements)
    # Thousands of tensors would drown the step; their number and bytes are what matters.
    return [(op, phase, (), ())]


_ROLE_OF = by_name("roles")


@cache
def _role(func: Any) -> str:
    packet = func._overloadpacket.__name__
    known = _ROLE_OF.get(packet) or _ROLE_OF.get(packet.rstrip("_"))
    return known or ("pointwise" if torch.Tag.pointwise in func.tags else "other")
