"""Microbenchmarks of the operations that stream memory, by name.

Each takes a matrix of ``rows`` x ``inner`` elements; ``inner`` is contiguous, and it is the dimension that is
normalised or reduced where there is one. Bytes are those of :class:`~tilefit.ops.Streaming`: every operand
and result once, whatever the implementation moves.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F

from tilefit.errors import UsageError
from tilefit.measure.pool import TORCH_DTYPES, Pool
from tilefit.ops import Streaming
from tilefit.ops.dtypes import size_bytes

Call = Callable[[], object]
#: From the operands to a call on them.
Prepare = Callable[..., Call]
aten = torch.ops.aten

#: Rows of the table of the embedding microbenchmarks.
VOCABULARY = 50304
#: Width of a head in ``permute_heads``, taps of the pooling window, groups of ``group_norm``.
_HEAD, _WINDOW, _GROUPS = 64, 3, 32
#: Most images of a batch.
_IMAGES = 32


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one microbenchmark is built and what it must move: a row of ``shapes/streaming.csv``.

    Attributes:
        role: A role of :class:`~tilefit.ops.Streaming`.
        takes: Its operands, words of ``_OPERANDS``.
        reads, writes: What must be moved, words of ``_BYTES``.
        flop_per_element: Arithmetic per element.
        reach: What is reduced, normalised or moved together, a word of ``_REACH``; empty: everything.
        strided: Operand and result lie in memory differently.
        kernels: GPU kernels it launches.
        function: The operation's name in PyTorch.
    """

    role: str
    takes: Sequence[str]
    reads: Sequence[str]
    writes: Sequence[str]
    flop_per_element: float
    reach: str
    strided: bool
    kernels: int
    function: str


#: Bytes of what is read and written, by (rows, inner, bytes of an element).
_BYTES: dict[str, Callable[[int, int, int], int]] = {
    "x": lambda r, i, s: r * i * s,
    "row": lambda r, i, s: i * s,
    "column": lambda r, i, s: r * s,
    "one": lambda r, i, s: s,
    "wide": lambda r, i, s: r * i * 4,
    "half": lambda r, i, s: r * i * min(s, 2),
    "mask": lambda r, i, s: r * i,
    "ids": lambda r, i, s: r * 8,  # of rows
    "places": lambda r, i, s: r * i * 8,  # of elements
    "statistic": lambda r, i, s: r * 4,  # in fp32
    "table": lambda r, i, s: VOCABULARY * i * s,
    "windows": lambda r, i, s: r * i * (s + 8) // 4,  # of every second pixel, each with its place
    "images": lambda r, i, s: gcd(r, _IMAGES) * i * s,
    "best": lambda r, i, s: r * min(8, i) * (s + 8),
}


def _images(pool: Pool, rows: int, channels: int, dtype: torch.dtype, channels_last: bool) -> torch.Tensor:
    """``rows`` pixels of so many channels as a batch of images, as square as they divide."""
    batch = gcd(rows, _IMAGES)
    pixels = rows // batch
    height = next(h for h in range(int(pixels**0.5), 0, -1) if pixels % h == 0)
    if channels_last:
        return pool.take((batch, height, pixels // height, channels), dtype).movedim(-1, 1)
    return pool.take((batch, channels, height, pixels // height), dtype)


def _heads(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    heads, batch = max(1, inner // _HEAD), gcd(rows, 16)
    return pool.take((batch, rows // batch, heads, inner // heads), dtype)


def _parameters(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """``rows`` parameters of ``inner`` elements, with their gradients."""
    parameters = []
    for _ in range(rows):
        parameter = pool.take((inner,), dtype).requires_grad_()
        parameter.grad = pool.take((inner,), dtype)
        parameters.append(parameter)
    return parameters


def _half(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype is torch.float32 else dtype


#: What microbenchmarks take, from (pool, rows, inner, dtype).
_OPERANDS: dict[str, Callable[[Pool, int, int, torch.dtype], torch.Tensor | list[torch.Tensor]]] = {
    "x": lambda pool, r, i, dtype: pool.take((r, i), dtype),
    "row": lambda pool, r, i, dtype: pool.take((i,), dtype),
    "blank": lambda pool, r, i, dtype: pool.blank((r, i), dtype),
    "mask": lambda pool, r, i, dtype: pool.take((r, i), torch.bool),
    "wide": lambda pool, r, i, dtype: pool.take((r, i), torch.float32),
    "wide_row": lambda pool, r, i, dtype: pool.take((i,), torch.float32),
    "half": lambda pool, r, i, dtype: pool.take((r, i), _half(dtype)),
    "half_type": lambda pool, r, i, dtype: pool.blank((0,), _half(dtype)),
    "table": lambda pool, r, i, dtype: pool.take((VOCABULARY, i), dtype),
    "words": lambda pool, r, i, dtype: pool.indices((r,), VOCABULARY),
    "classes": lambda pool, r, i, dtype: pool.indices((r,), i),
    "rows": lambda pool, r, i, dtype: pool.indices((r,), r),
    "places": lambda pool, r, i, dtype: pool.indices((r, i), i),
    "nhwc": lambda pool, r, i, dtype: _images(pool, r, i, dtype, channels_last=True),
    "nchw": lambda pool, r, i, dtype: _images(pool, r, i, dtype, channels_last=False),
    "heads": _heads,
    "left": lambda pool, r, i, dtype: pool.take((r, i // 2), dtype),
    "right": lambda pool, r, i, dtype: pool.take((r, i - i // 2), dtype),
    "three": lambda pool, r, i, dtype: pool.take((r, 3 * i), dtype),
    "parameters": _parameters,
}


#: Elements that are reduced, normalised or moved together, from (rows, inner).
_REACH: dict[str, Callable[[int, int], int]] = {
    "": lambda rows, inner: 0,
    "one": lambda rows, inner: 1,
    "row": lambda rows, inner: inner,
    "half_row": lambda rows, inner: inner // 2,
    "column": lambda rows, inner: rows,
    "head": lambda rows, inner: inner // max(1, inner // _HEAD),
    "group": lambda rows, inner: inner // gcd(inner, _GROUPS) * (rows // gcd(rows, _IMAGES)),
}


# --- calls -----------------------------------------------------------------------------------------


def _on(function: Callable[..., object]) -> Prepare:
    """The function itself is called."""
    return lambda *operands: partial(function, *operands)


def _gradient(prepare: Prepare) -> Prepare:
    """The gradients of a call by all its operands, from that of its result, which is taken last."""

    def prepared(*operands: torch.Tensor) -> Call:
        *inputs, dy = operands
        out: Any = prepare(*(each.requires_grad_() for each in inputs))()
        return lambda: torch.autograd.grad(out, inputs, dy, retain_graph=True)

    return prepared


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Sequence[torch.Tensor]:
    normed: Sequence[torch.Tensor] = aten.native_layer_norm(x, x.shape[-1:], weight, bias, 1e-5)
    return normed


def _layer_norm_backward(x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Call:
    _, mean, rstd = _layer_norm(x, weight, bias)
    backward, wanted = aten.native_layer_norm_backward, [True, True, True]
    return lambda: backward(dy, x, x.shape[-1:], mean, rstd, weight, bias, wanted)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def _batch_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Call:
    mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
    return lambda: F.batch_norm(x, mean, variance, weight, bias, training=True)


def _softmax_backward(dy: torch.Tensor, x: torch.Tensor) -> Call:
    out = torch.softmax(x, -1)
    return lambda: aten._softmax_backward_data(dy, out, -1, x.dtype)


def _log_softmax_backward(dy: torch.Tensor, x: torch.Tensor) -> Call:
    out = torch.log_softmax(x, -1)
    return lambda: aten._log_softmax_backward_data(dy, out, -1, x.dtype)


def _nll(x: torch.Tensor, target: torch.Tensor) -> Sequence[torch.Tensor]:
    loss: Sequence[torch.Tensor] = aten.nll_loss_forward(x, target, None, 1, -100)
    return loss


def _nll_backward(x: torch.Tensor, target: torch.Tensor) -> Call:
    dy, (_, weight) = x.new_ones(()), _nll(x, target)
    return lambda: aten.nll_loss_backward(dy, x, target, None, 1, -100, weight)


def _max_pool(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(x, _WINDOW, 2, 1)


def _max_pool_backward(x: torch.Tensor) -> Call:
    out = _max_pool(x.requires_grad_())
    dy = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, x, dy, retain_graph=True)


def _stepped(make: Callable[..., torch.optim.Optimizer], **options: object) -> Prepare:
    """A step, after one that created the optimizer's state."""

    def prepared(parameters: list[torch.Tensor]) -> Call:
        optimizer = make(parameters, lr=1e-4, **options)
        optimizer.step()
        return optimizer.step

    return prepared


# --- the tables ------------------------------------------------------------------------------------

_ADAMW, _SGD = torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)

#: What is called on the operands, by the microbenchmark.
_FUNCTIONS: dict[str, Callable[..., object]] = {
    "fill": torch.Tensor.zero_,
    "mul_scalar": lambda x: x * 1.5,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "pow": lambda x: x**3,
    "add": torch.add,
    "mul": torch.mul,
    "add_": torch.Tensor.add_,
    "add_row": torch.add,
    "addcmul": torch.addcmul,
    "relu_backward": lambda x, y: aten.threshold_backward(x, y, 0),
    "gelu_backward": aten.gelu_backward,
    "silu_backward": aten.silu_backward,
    "dropout": lambda x: aten.native_dropout(x, 0.1, True),
    "masked_fill": lambda mask, x: x.masked_fill(mask, -1.0),
    "where": torch.where,
    "sum_last": lambda x: x.sum(-1),
    "sum_first": lambda x: x.sum(0),
    "sum_all": torch.sum,
    "amax_last": lambda x: x.amax(-1),
    "argmax_last": lambda x: x.argmax(-1),
    "norm_all": torch.linalg.vector_norm,
    "cumsum": lambda x: x.cumsum(-1),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": lambda x, weight, bias: F.group_norm(x, gcd(x.shape[1], _GROUPS), weight, bias),
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "nll_loss": _nll,
    "cross_entropy": F.cross_entropy,
    "mse_loss": F.mse_loss,
    "embedding": aten.embedding,
    "embedding_backward": lambda dy, words: aten.embedding_dense_backward(dy, words, VOCABULARY, -1, False),
    "index_select": lambda x, rows: torch.index_select(x, 0, rows),
    "index_add": lambda out, rows, x: out.index_add_(0, rows, x),
    "gather": lambda x, places: torch.gather(x, -1, places),
    "sort": lambda x: torch.sort(x, -1),
    "topk": lambda x: torch.topk(x, min(8, x.shape[-1]), -1),
    "max_pool_nhwc": _max_pool,
    "max_pool_nchw": _max_pool,
    "average_pool": lambda x: F.adaptive_avg_pool2d(x, 1),
    "clone": torch.clone,
    "cast_to_fp32": lambda x: x.to(torch.float32),
    "cast_from_fp32": lambda x, half: x.to(half.dtype),
    "transpose": lambda x: x.t().contiguous(),
    "permute_heads": lambda x: x.transpose(1, 2).contiguous(),
    "to_channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "cat": lambda *parts: torch.cat(parts, -1),
    "slice": lambda x: x[:, x.shape[1] // 3 : x.shape[1] // 3 * 2].contiguous(),
    "clip_grad_norm": lambda p: torch.nn.utils.clip_grad_norm_(p, 1e9, foreach=True),
}
#: What makes the call, where it needs more than the operands.
_PREPARED: dict[str, Prepare] = {
    "layer_norm_backward": _layer_norm_backward,
    "rms_norm_backward": _gradient(_on(_rms_norm)),
    **dict.fromkeys(("batch_norm_nhwc", "batch_norm_nchw"), _batch_norm),
    **dict.fromkeys(("batch_norm_nhwc_backward", "batch_norm_nchw_backward"), _gradient(_batch_norm)),
    "softmax_backward": _softmax_backward,
    "log_softmax_backward": _log_softmax_backward,
    "nll_loss_backward": _nll_backward,
    "max_pool_nhwc_backward": _max_pool_backward,
    "adamw_fused": _stepped(_ADAMW, fused=True),
    "adamw_foreach": _stepped(_ADAMW, foreach=True),
    "sgd_fused": _stepped(_SGD, fused=True),
    "sgd_foreach": _stepped(_SGD, foreach=True),
}


def _recipe(row: dict[str, str]) -> Recipe:
    takes, reads, writes = (row[name].split() for name in ("takes", "reads", "writes"))
    flop, reach, strided = float(row["flop_per_element"]), row["reach"], bool(row["strided"])
    return Recipe(
        row["role"], takes, reads, writes, flop, reach, strided, int(row["kernels"]), row["function"]
    )


def _read() -> dict[str, Recipe]:
    text = resources.files("tilefit.measure").joinpath("shapes", "streaming.csv").read_text()
    return {row["name"]: _recipe(row) for row in csv.DictReader(text.splitlines())}


RECIPES: dict[str, Recipe] = _read()


def operation(name: str, rows: int, inner: int, dtype: str) -> Streaming:
    """The operation a microbenchmark runs.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in RECIPES:
        raise UsageError(f"unknown microbenchmark {name!r}", hint=f"Use one of: {', '.join(RECIPES)}.")
    recipe = RECIPES[name]
    read_bytes, write_bytes = (
        sum(_BYTES[word](rows, inner, size_bytes(dtype)) for word in words)
        for words in (recipe.reads, recipe.writes)
    )
    return Streaming(
        recipe.role,
        rows * inner,
        read_bytes,
        write_bytes,
        dtype=dtype,
        flop_per_element=recipe.flop_per_element,
        inner=_REACH[recipe.reach](rows, inner),
        strided=recipe.strided,
        kernels=recipe.kernels,
        function=recipe.function,
    )


def build(name: str, rows: int, inner: int, dtype: str, pool: Pool) -> Call:
    """A call that runs a microbenchmark on fresh pieces of the pool."""
    takes, type_ = RECIPES[name].takes, TORCH_DTYPES[dtype]
    operands = (_OPERANDS[word](pool, rows, inner, type_) for word in takes)
    return (_PREPARED.get(name) or _on(_FUNCTIONS[name]))(*operands)


def representative(op: Streaming) -> str:
    """The microbenchmark that stands for an operation: the same role and about the same traffic.

    Raises:
        UsageError: nothing stands for it (a collective, or an operation nothing is known about).
    """
    matrix = max(1, op.elements * size_bytes(op.dtype))
    reads = round(op.read_bytes / matrix)
    backward = reads >= 2
    if op.role == "pointwise":
        return ("fill", "gelu" if op.flop_per_element >= 8 else "mul_scalar", "add", "addcmul")[min(reads, 3)]
    if op.role == "copy":
        if op.strided:
            return "transpose"
        if op.read_bytes == op.write_bytes:
            return "clone"
        return "cast_to_fp32" if op.write_bytes > op.read_bytes else "cast_from_fp32"
    names = {
        "reduction": "sum_last" if op.inner else "sum_all",
        "normalization": "layer_norm_backward" if backward else "layer_norm",
        "softmax": "softmax_backward" if backward else "softmax",
        "loss": "cross_entropy",
        "embedding": "embedding_backward" if op.write_bytes > 2 * op.read_bytes else "embedding",
        "indexing": "index_select",
        "sort": "sort",
        "pooling": "max_pool_nhwc" if op.strided else "max_pool_nchw",
        "optimizer": "adamw_fused",
    }
    if op.role not in names:
        raise UsageError(f"no microbenchmark stands for the role {op.role!r}", where=op.shape)
    return names[op.role]


def instance(op: Streaming, pool: Pool) -> Call:
    """A call that runs the representative of an operation on about as many elements."""
    inner = op.inner or min(op.elements, 1024)
    return build(representative(op), max(1, round(op.elements / inner)), inner, op.dtype, pool)
