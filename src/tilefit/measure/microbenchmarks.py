"""From an operation to a PyTorch call that runs it, and nothing else, on data of a :class:`Pool`."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from tilefit.errors import UsageError
from tilefit.measure import streaming
from tilefit.measure.pool import TORCH_DTYPES, Pool
from tilefit.ops import (
    BACKWARD_DATA,
    BACKWARD_WEIGHT,
    FORWARD,
    Attention,
    Conv,
    Gemm,
    Op,
    Recurrent,
    Streaming,
)
from tilefit.ops.recurrent import INFERENCE
from tilefit.rnn.convert import convert

#: A call that runs one operation once.
Call = Callable[[], object]


def instance(op: Op, pool: Pool) -> Call:
    """A call that runs ``op`` on fresh pieces of the pool.

    What the operation needs besides its operands (the forward pass before a backward pass, the weights
    of a recurrent layer) is prepared here and not in the call. Two instances share no operand, so a
    sequence of instances is cold in L2 and repeated calls of one are warm.

    Raises:
        UsageError: PyTorch has no call for this operation (for example fp8 in a layout other than TN).
    """
    if type(op) not in _INSTANCES:
        raise UsageError(f"no microbenchmark for {type(op).__name__}")
    return _INSTANCES[type(op)](op, pool)


def set_tf32(op: Op) -> None:
    """Choose how fp32 storage is multiplied; other element types are not concerned."""
    if op.dtype in ("fp32", "tf32"):
        allow = op.dtype == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = allow
        torch.backends.cudnn.allow_tf32 = allow


# --- matrix products -------------------------------------------------------------------------------


def gemm_operands(op: Gemm, pool: Pool) -> tuple[torch.Tensor, torch.Tensor]:
    """A [m, k] and B [k, n] of a product, stored as its layout says; with a batch, a dimension more."""
    a = _matrix(pool, op, op.m, op.k, op.layout[1] == "T", op.ld_a)
    b = _matrix(pool, op, op.k, op.n, op.layout[0] == "T", op.ld_b)
    return a, b


def _matrix(pool: Pool, op: Gemm, rows: int, columns: int, transposed: bool, ld: int) -> torch.Tensor:
    """A rows x columns operand: row-major, or the transposed view of a row-major one, ``ld`` apart."""
    if transposed:
        rows, columns = columns, rows
    width = ld or columns
    shape = (op.batch, rows, width) if op.batch > 1 else (rows, width)
    matrix = pool.take(shape, TORCH_DTYPES[op.dtype])[..., :columns]
    return matrix.transpose(-1, -2) if transposed else matrix


def _gemm(op: Gemm, pool: Pool) -> Call:
    dtype = TORCH_DTYPES[op.dtype]
    a, b = gemm_operands(op, pool)
    if op.dtype == "fp8":
        if op.layout != "TN" or op.batch > 1:
            raise UsageError(
                "PyTorch multiplies fp8 matrices one at a time in layout TN", where=f"{op.shape} {op.layout}"
            )
        one = torch.ones((), device=pool.device)
        out_dtype = TORCH_DTYPES[op.out_dtype or "bf16"]
        return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=out_dtype)
    if op.dtype == "int8":
        if op.batch > 1:
            raise UsageError("PyTorch multiplies int8 matrices one at a time", where=op.shape)
        c = pool.blank((op.m, op.n), torch.int32)
        return lambda: torch._int_mm(a, b, out=c)
    set_tf32(op)
    if op.batch > 1:
        out = pool.blank((op.batch, op.m, op.n), dtype)
        return lambda: torch.bmm(a, b, out=out)
    out = pool.blank((op.m, op.n), dtype)
    if op.bias:
        bias = pool.take((op.n,), dtype)
        return lambda: torch.addmm(bias, a, b, out=out)
    return lambda: torch.mm(a, b, out=out)


# --- convolution -----------------------------------------------------------------------------------


def _image(pool: Pool, op: Conv, batch: int, channels: int, size: tuple[int, ...]) -> torch.Tensor:
    dtype = TORCH_DTYPES[op.dtype]
    if not op.channels_last:
        return pool.take((batch, channels, *size), dtype)
    return pool.take((batch, *size, channels), dtype).movedim(-1, 1)


def _conv(op: Conv, pool: Pool) -> Call:
    x = _image(pool, op, op.batch, op.in_channels, op.input_size)
    weight = _image(pool, op, op.out_channels, op.in_channels // op.groups, op.kernel_size)
    spatial = (list(op.stride), list(op.padding), list(op.dilation))
    transposed = (False, [0] * len(op.stride), op.groups)
    set_tf32(op)
    if op.direction == FORWARD:
        return lambda: torch.ops.aten.convolution(x, weight, None, *spatial, *transposed)
    dy = _image(pool, op, op.batch, op.out_channels, op.output_size)
    mask = [op.direction == BACKWARD_DATA, op.direction == BACKWARD_WEIGHT, False]
    return lambda: torch.ops.aten.convolution_backward(dy, x, weight, None, *spatial, *transposed, mask)


# --- attention -------------------------------------------------------------------------------------


def _attention(op: Attention, pool: Pool) -> Call:
    dtype = TORCH_DTYPES[op.dtype]

    def heads(count: int, length: int, width: int) -> torch.Tensor:
        # As a model has them: a view of the projection's output (batch, length, heads * width).
        return pool.take((op.batch, length, count, width), dtype).transpose(1, 2)

    q = heads(op.num_heads, op.seq_len, op.head_dim)
    k = heads(op.num_kv_heads, op.kv_len, op.head_dim)
    v = heads(op.num_kv_heads, op.kv_len, op.value_dim)
    mask = _mask(op, pool)
    set_tf32(op)

    def forward() -> torch.Tensor:
        grouped = op.num_kv_heads != op.num_heads
        return F.scaled_dot_product_attention(q, k, v, mask, op.dropout_p, op.is_causal, enable_gqa=grouped)

    if op.direction == FORWARD:
        return forward
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = forward()
    dy = heads(op.num_heads, op.seq_len, op.value_dim)
    return lambda: torch.autograd.grad(out, inputs, dy, retain_graph=True)


def _mask(op: Attention, pool: Pool) -> torch.Tensor | None:
    """A mask of ``op.mask_bytes``: additive or boolean, per head, per sample or shared by all."""
    if not op.mask_bytes:
        return None
    scores = op.seq_len, op.kv_len
    shapes = (1, 1, *scores), (op.batch, 1, *scores), (op.batch, op.num_heads, *scores)
    for dtype in (TORCH_DTYPES[op.dtype], torch.bool):
        for shape in (*shapes, (op.batch, 1, 1, op.kv_len)):
            if prod(shape) * dtype.itemsize == op.mask_bytes:
                return pool.take(shape, dtype).expand(*shape[:2], *scores)
    raise UsageError(f"no mask of {op.mask_bytes} bytes for attention {op.shape}")


# --- recurrent layers ------------------------------------------------------------------------------


def _recurrent(op: Recurrent, pool: Pool) -> Call:
    """Forward in training mode, but of a layer of ``tilefit.nn`` for inference; ``backward-data`` alone;
    ``backward-weight`` **with** the data gradient.

    PyTorch has no call for the weight gradient alone: subtract the data gradient's time to get it.
    """
    dtype = TORCH_DTYPES[op.dtype]
    kind, _, nonlinearity = op.mode.partition("_")  # of ``RNN_TANH``
    more: dict[str, Any] = {"nonlinearity": nonlinearity.lower()} if nonlinearity else {}
    more |= {"proj_size": op.proj_size} if op.proj_size else {}
    more |= {"num_layers": op.num_layers, "bidirectional": op.bidirectional}
    make = getattr(torch.nn, kind)
    layer = make(op.input_size, op.hidden_size, device=pool.device, dtype=dtype, **more)
    if op.persistent:
        layer = convert(layer)
    set_tf32(op)
    x = pool.take((op.seq_len, op.batch, op.input_size), dtype).requires_grad_()
    inputs: torch.Tensor | torch.nn.utils.rnn.PackedSequence = x
    if op.packed:
        # Equal lengths: the same arithmetic, the packed code path.
        inputs = torch.nn.utils.rnn.pack_padded_sequence(x, torch.full((op.batch,), op.seq_len))
    if op.direction == FORWARD:
        return torch.no_grad()(lambda: layer(inputs)) if op.persistent == INFERENCE else lambda: layer(inputs)
    out = layer(inputs)[0]
    out = out.data if op.packed else out
    dy = pool.take(out.shape, dtype)
    wanted = [x] if op.direction == BACKWARD_DATA else [x, *layer.parameters()]
    return lambda: torch.autograd.grad(out, wanted, dy, retain_graph=True)


#: What makes the calls of each kind of operation.
_INSTANCES: dict[type[Op], Callable[[Any, Pool], Call]] = {
    Gemm: _gemm,
    Conv: _conv,
    Attention: _attention,
    Recurrent: _recurrent,
    Streaming: streaming.instance,
}
