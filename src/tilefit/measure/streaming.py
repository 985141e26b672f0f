"""Microbenchmarks of the operations that stream memory, by name.

Each takes a matrix of ``rows`` x ``inner`` elements; ``inner`` is contiguous, and it is the dimension that is
normalised or reduced where there is one. Bytes are those of :class:`~tilefit.ops.Streaming`: every operand
and result once, whatever the implementation moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import torch
import torch.nn.functional as F

from tilefit.errors import UsageError
from tilefit.measure.pool import TORCH_DTYPES, Pool
from tilefit.ops import Streaming
from tilefit.ops.dtypes import size_bytes

Call = Callable[[], object]
aten = torch.ops.aten

#: Rows of the table of the embedding microbenchmarks.
VOCABULARY = 50304
#: Width of a head in ``permute_heads``, taps of the pooling window, groups of ``group_norm``.
_HEAD, _WINDOW, _GROUPS = 64, 3, 32
#: Most images of a batch.
_IMAGES = 32


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one microbenchmark is built and what it must move.

    Attributes:
        role: A role of :class:`~tilefit.ops.Streaming`.
        build: (pool, rows, inner, dtype) -> call.
        traffic: (rows, inner, bytes of an element) -> bytes read, bytes written.
        flop_per_element: Arithmetic per element.
        reach: (rows, inner) -> elements that are reduced, normalised or moved together; 0 for all of them.
        strided: Operand and result lie in memory differently.
        kernels: GPU kernels it launches.
    """

    role: str
    build: Callable[[Pool, int, int, torch.dtype], Call]
    traffic: Callable[[int, int, int], tuple[int, int]]
    flop_per_element: float = 1.0
    reach: Callable[[int, int], int] = lambda rows, inner: 0
    strided: bool = False
    kernels: int = 1


def _row(rows: int, inner: int) -> int:
    return inner


def _single(rows: int, inner: int) -> int:
    return 1


def _head(rows: int, inner: int) -> int:
    return inner // max(1, inner // _HEAD)


def _column(rows: int, inner: int) -> int:
    return rows


def _group(rows: int, inner: int) -> int:
    return inner // gcd(inner, _GROUPS) * (rows // gcd(rows, _IMAGES))


def _reads(reads: int, writes: int = 1) -> Callable[[int, int, int], tuple[int, int]]:
    """Whole matrices read and written."""
    return lambda rows, inner, size: (reads * rows * inner * size, writes * rows * inner * size)


# --- builders --------------------------------------------------------------------------------------


def _on(operands: int, function: Callable[..., object]) -> Callable[[Pool, int, int, torch.dtype], Call]:
    """``function`` of that many random matrices."""

    def build(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
        tensors = [pool.take((rows, inner), dtype) for _ in range(operands)]
        return lambda: function(*tensors)

    return build


def _with_mask(
    function: Callable[..., object], operands: int
) -> Callable[[Pool, int, int, torch.dtype], Call]:
    def build(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
        mask = pool.take((rows, inner), torch.bool)
        tensors = [pool.take((rows, inner), dtype) for _ in range(operands)]
        return lambda: function(mask, *tensors)

    return build


def _add_row(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
    x, row = pool.take((rows, inner), dtype), pool.take((inner,), dtype)
    return lambda: x + row


def _fill(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
    out = pool.blank((rows, inner), dtype)
    return lambda: out.zero_()


def _layer_norm(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
    x, weight, bias = pool.take((rows, inner), dtype), pool.take((inner,), dtype), pool.take((inner,), dtype)
    return lambda: aten.native_layer_norm(x, [inner], weight, bias, 1e-5)


def _layer_norm_backward(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
    x, dy = pool.take((rows, inner), dtype), pool.take((rows, inner), dtype)
    weight, bias = pool.take((inner,), dtype), pool.take((inner,), dtype)
    _, mean, rstd = aten.native_layer_norm(x, [inner], weight, bias, 1e-5)
    return lambda: aten.native_layer_norm_backward(
        dy, x, [inner], mean, rstd, weight, bias, [True, True, True]
    )


def _rms_norm(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
    x, weight = pool.take((rows, inner), dtype), pool.take((inner,), dtype)
    return lambda: F.rms_norm(x, (inner,), weight, 1e-6)


def _rms_norm_backward(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
    x, dy = pool.take((rows, inner), dtype).requires_grad_(), pool.take((rows, inner), dtype)
    weight = pool.take((inner,), dtype).requires_grad_()
    out = F.rms_norm(x, (inner,), weight, 1e-6)
    return lambda: torch.autograd.grad(out, (x, weight), dy, retain_graph=True)


def _images(pool: Pool, rows: int, channels: int, dtype: torch.dtype, channels_last: bool) -> torch.Tensor:
    """``rows`` pixels of so many channels as a batch of images, as square as they divide."""
    batch = gcd(rows, _IMAGES)
    pixels = rows // batch
    height = next(h for h in range(int(pixels**0.5), 0, -1) if pixels % h == 0)
    if channels_last:
        return pool.take((batch, height, pixels // height, channels), dtype).movedim(-1, 1)
    return pool.take((batch, channels, height, pixels // height), dtype)


def _batch_norm(channels_last: bool, backward: bool) -> Callable[[Pool, int, int, torch.dtype], Call]:
    def build(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
        x = _images(pool, rows, inner, dtype, channels_last)
        weight, bias = pool.take((inner,), torch.float32), pool.take((inner,), torch.float32)
        mean, variance = torch.zeros_like(weight), torch.ones_like(weight)

        def forward() -> torch.Tensor:
            return F.batch_norm(x, mean, variance, weight, bias, training=True)

        if not backward:
            return forward
        inputs = (x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_())
        out, dy = forward(), _images(pool, rows, inner, dtype, channels_last)
        return lambda: torch.autograd.grad(out, inputs, dy, retain_graph=True)

    return build


def _group_norm(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
    x = _images(pool, rows, inner, dtype, channels_last=False)
    weight, bias = pool.take((inner,), dtype), pool.take((inner,), dtype)
    groups = gcd(inner, _GROUPS)
    return lambda: F.group_norm(x, groups, weight, bias)


def _softmax_backward(log: bool) -> Callable[[Pool, int, int, torch.dtype], Call]:
    def build(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
        dy, x = pool.take((rows, inner), dtype), pool.take((rows, inner), dtype)
        if log:
            out = torch.log_softmax(x, -1)
            return lambda: aten._log_softmax_backward_data(dy, out, -1, dtype)
        out = torch.softmax(x, -1)
        return lambda: aten._softmax_backward_data(dy, out, -1, dtype)

    return build


def _nll(backward: bool) -> Callable[[Pool, int, int, torch.dtype], Call]:
    def build(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
        x, target = pool.take((rows, inner), dtype), pool.indices((rows,), inner)
        if not backward:
            return lambda: aten.nll_loss_forward(x, target, None, 1, -100)
        dy, weight = (
            torch.ones((), dtype=dtype, device=pool.device),
            aten.nll_loss_forward(x, target, None, 1, -100)[1],
        )
        return lambda: aten.nll_loss_backward(dy, x, target, None, 1, -100, weight)

    return build


def _cross_entropy(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
    x, target = pool.take((rows, inner), dtype), pool.indices((rows,), inner)
    return lambda: F.cross_entropy(x, target)


def _embedding(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
    table, indices = pool.take((VOCABULARY, inner), dtype), pool.indices((rows,), VOCABULARY)
    return lambda: aten.embedding(table, indices)


def _embedding_backward(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
    dy, indices = pool.take((rows, inner), dtype), pool.indices((rows,), VOCABULARY)
    return lambda: aten.embedding_dense_backward(dy, indices, VOCABULARY, -1, False)


def _index_select(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
    x, indices = pool.take((rows, inner), dtype), pool.indices((rows,), rows)
    return lambda: torch.index_select(x, 0, indices)


def _index_add(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
    out, x, indices = (
        pool.take((rows, inner), dtype),
        pool.take((rows, inner), dtype),
        pool.indices((rows,), rows),
    )
    return lambda: out.index_add_(0, indices, x)


def _gather(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
    x, indices = pool.take((rows, inner), dtype), pool.indices((rows, inner), inner)
    return lambda: torch.gather(x, -1, indices)


def _pool2d(channels_last: bool, backward: bool) -> Callable[[Pool, int, int, torch.dtype], Call]:
    def build(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
        x = _images(pool, rows, inner, dtype, channels_last)
        if not backward:
            return lambda: F.max_pool2d(x, _WINDOW, 2, 1)
        out = F.max_pool2d(x.requires_grad_(), _WINDOW, 2, 1)
        dy = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, x, dy, retain_graph=True)

    return build


def _average_pool(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
    x = _images(pool, rows, inner, dtype, channels_last=True)
    return lambda: F.adaptive_avg_pool2d(x, 1)


def _cast(to_fp32: bool) -> Callable[[Pool, int, int, torch.dtype], Call]:
    def build(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
        source, target = (dtype, torch.float32) if to_fp32 else (torch.float32, dtype)
        if dtype is torch.float32:
            source, target = (torch.bfloat16, dtype) if to_fp32 else (dtype, torch.bfloat16)
        x = pool.take((rows, inner), source)
        return lambda: x.to(target)

    return build


def _permute_heads(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
    heads, batch = max(1, inner // _HEAD), gcd(rows, 16)
    x = pool.take((batch, rows // batch, heads, inner // heads), dtype)
    return lambda: x.transpose(1, 2).contiguous()


def _to_channels_last(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
    x = _images(pool, rows, inner, dtype, channels_last=False)
    return lambda: x.contiguous(memory_format=torch.channels_last)


def _cat(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
    left, right = pool.take((rows, inner // 2), dtype), pool.take((rows, inner - inner // 2), dtype)
    return lambda: torch.cat((left, right), -1)


def _slice(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
    x = pool.take((rows, 3 * inner), dtype)
    return lambda: x[:, inner : 2 * inner].contiguous()


def _optimizer(
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
) -> Callable[[Pool, int, int, torch.dtype], Call]:
    """A step over ``rows`` parameters of ``inner`` elements, after one that created the state."""

    def build(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
        parameters = []
        for _ in range(rows):
            parameter = pool.take((inner,), dtype).requires_grad_()
            parameter.grad = pool.take((inner,), dtype)
            parameters.append(parameter)
        optimizer = make(parameters)
        optimizer.step()
        return optimizer.step

    return build


def _clip_grad_norm(pool: Pool, rows: int, inner: int, dtype: torch.dtype) -> Call:
    parameters = []
    for _ in range(rows):
        parameter = pool.take((inner,), dtype).requires_grad_()
        parameter.grad = pool.take((inner,), dtype)
        parameters.append(parameter)
    return lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e9, foreach=True)


# --- the table -------------------------------------------------------------------------------------

RECIPES: dict[str, Recipe] = {
    "fill": Recipe("pointwise", _fill, _reads(0), 0),
    "mul_scalar": Recipe("pointwise", _on(1, lambda x: x * 1.5), _reads(1)),
    "relu": Recipe("pointwise", _on(1, torch.relu), _reads(1)),
    "gelu": Recipe("pointwise", _on(1, F.gelu), _reads(1), 10),
    "gelu_tanh": Recipe("pointwise", _on(1, lambda x: F.gelu(x, approximate="tanh")), _reads(1), 10),
    "silu": Recipe("pointwise", _on(1, F.silu), _reads(1), 5),
    "tanh": Recipe("pointwise", _on(1, torch.tanh), _reads(1), 5),
    "exp": Recipe("pointwise", _on(1, torch.exp), _reads(1), 4),
    "pow": Recipe("pointwise", _on(1, lambda x: x**3), _reads(1), 2),
    "add": Recipe("pointwise", _on(2, torch.add), _reads(2)),
    "mul": Recipe("pointwise", _on(2, torch.mul), _reads(2)),
    "add_": Recipe("pointwise", _on(2, lambda x, y: x.add_(y)), _reads(2)),
    "add_row": Recipe("pointwise", _add_row, lambda r, i, s: ((r * i + i) * s, r * i * s), reach=_row),
    "addcmul": Recipe("pointwise", _on(3, torch.addcmul), _reads(3), 2),
    "relu_backward": Recipe("pointwise", _on(2, lambda x, y: aten.threshold_backward(x, y, 0)), _reads(2)),
    "gelu_backward": Recipe("pointwise", _on(2, lambda x, y: aten.gelu_backward(x, y)), _reads(2), 15),
    "silu_backward": Recipe("pointwise", _on(2, lambda x, y: aten.silu_backward(x, y)), _reads(2), 8),
    "dropout": Recipe(
        "pointwise",
        _on(1, lambda x: aten.native_dropout(x, 0.1, True)),
        lambda r, i, s: (r * i * s, r * i * (s + 1)),
        10,
    ),
    "masked_fill": Recipe(
        "pointwise",
        _with_mask(lambda mask, x: x.masked_fill(mask, -1.0), 1),
        lambda r, i, s: (r * i * (s + 1), r * i * s),
    ),
    "where": Recipe(
        "pointwise", _with_mask(torch.where, 2), lambda r, i, s: (r * i * (2 * s + 1), r * i * s)
    ),
    "sum_last": Recipe(
        "reduction",
        _on(1, lambda x: x.sum(-1)),
        lambda r, i, s: (r * i * s, r * s),
        reach=_row,
    ),
    "sum_first": Recipe(
        "reduction", _on(1, lambda x: x.sum(0)), lambda r, i, s: (r * i * s, i * s), strided=True
    ),
    "sum_all": Recipe("reduction", _on(1, torch.sum), lambda r, i, s: (r * i * s, s), kernels=2),
    "amax_last": Recipe(
        "reduction",
        _on(1, lambda x: x.amax(-1)),
        lambda r, i, s: (r * i * s, r * s),
        reach=_row,
    ),
    "argmax_last": Recipe(
        "reduction",
        _on(1, lambda x: x.argmax(-1)),
        lambda r, i, s: (r * i * s, r * 8),
        reach=_row,
    ),
    "norm_all": Recipe(
        "reduction", _on(1, torch.linalg.vector_norm), lambda r, i, s: (r * i * s, s), 2, kernels=2
    ),
    "cumsum": Recipe("reduction", _on(1, lambda x: x.cumsum(-1)), _reads(1), reach=_row),
    "layer_norm": Recipe(
        "normalization",
        _layer_norm,
        lambda r, i, s: ((r * i + 2 * i) * s, r * i * s + 8 * r),
        8,
        reach=_row,
    ),
    "layer_norm_backward": Recipe(
        "normalization",
        _layer_norm_backward,
        lambda r, i, s: ((2 * r * i + i) * s + 8 * r, (r * i + 2 * i) * s),
        14,
        reach=_row,
        kernels=2,
    ),
    "rms_norm": Recipe(
        "normalization",
        _rms_norm,
        lambda r, i, s: ((r * i + i) * s, r * i * s + 4 * r),
        5,
        reach=_row,
    ),
    "rms_norm_backward": Recipe(
        "normalization",
        _rms_norm_backward,
        lambda r, i, s: ((2 * r * i + i) * s + 4 * r, (r * i + i) * s),
        10,
        reach=_row,
        kernels=2,
    ),
    "batch_norm_nhwc": Recipe(
        "normalization", _batch_norm(True, False), _reads(1), 6, reach=_column, strided=True
    ),
    "batch_norm_nchw": Recipe("normalization", _batch_norm(False, False), _reads(1), 6, reach=_column),
    "batch_norm_nhwc_backward": Recipe(
        "normalization", _batch_norm(True, True), _reads(2), 10, reach=_column, strided=True
    ),
    "batch_norm_nchw_backward": Recipe(
        "normalization", _batch_norm(False, True), _reads(2), 10, reach=_column
    ),
    "group_norm": Recipe("normalization", _group_norm, _reads(1), 8, reach=_group),
    "softmax": Recipe("softmax", _on(1, lambda x: torch.softmax(x, -1)), _reads(1), 6, reach=_row),
    "softmax_backward": Recipe("softmax", _softmax_backward(False), _reads(2), 4, reach=_row),
    "log_softmax": Recipe("softmax", _on(1, lambda x: torch.log_softmax(x, -1)), _reads(1), 6, reach=_row),
    "log_softmax_backward": Recipe("softmax", _softmax_backward(True), _reads(2), 4, reach=_row),
    "nll_loss": Recipe("loss", _nll(False), lambda r, i, s: (r * (s + 8), s), reach=_row),
    "nll_loss_backward": Recipe(
        "loss", _nll(True), lambda r, i, s: (r * 8, r * i * s), reach=_row, kernels=2
    ),
    "cross_entropy": Recipe(
        "loss", _cross_entropy, lambda r, i, s: (r * i * s, r * i * s), 6, reach=_row, kernels=2
    ),
    "mse_loss": Recipe("loss", _on(2, F.mse_loss), lambda r, i, s: (2 * r * i * s, s), 3, kernels=2),
    "embedding": Recipe("embedding", _embedding, lambda r, i, s: (r * (i * s + 8), r * i * s), 0, reach=_row),
    "embedding_backward": Recipe(
        "embedding",
        _embedding_backward,
        lambda r, i, s: (r * (i * s + 8), VOCABULARY * i * s),
        reach=_row,
        kernels=6,
    ),
    "index_select": Recipe(
        "indexing", _index_select, lambda r, i, s: (r * (i * s + 8), r * i * s), 0, reach=_row
    ),
    "index_add": Recipe("indexing", _index_add, lambda r, i, s: (r * (2 * i * s + 8), r * i * s), reach=_row),
    "gather": Recipe("indexing", _gather, lambda r, i, s: (r * i * (s + 8), r * i * s), 0, reach=_single),
    "sort": Recipe(
        "sort",
        _on(1, lambda x: torch.sort(x, -1)),
        lambda r, i, s: (r * i * s, r * i * (s + 8)),
        20,
        reach=_row,
        kernels=4,
    ),
    "topk": Recipe(
        "sort",
        _on(1, lambda x: torch.topk(x, min(8, x.shape[-1]), -1)),
        lambda r, i, s: (r * i * s, r * min(8, i) * (s + 8)),
        10,
        reach=_row,
        kernels=2,
    ),
    "max_pool_nhwc": Recipe(
        "pooling", _pool2d(True, False), lambda r, i, s: (r * i * s, r * i * (s + 8) // 4), 9, strided=True
    ),
    "max_pool_nchw": Recipe(
        "pooling", _pool2d(False, False), lambda r, i, s: (r * i * s, r * i * (s + 8) // 4), 9
    ),
    "max_pool_nhwc_backward": Recipe(
        "pooling", _pool2d(True, True), lambda r, i, s: (r * i * (s + 8) // 4, r * i * s), 9, strided=True
    ),
    "average_pool": Recipe(
        "reduction",
        _average_pool,
        lambda r, i, s: (r * i * s, gcd(r, _IMAGES) * i * s),
        strided=True,
    ),
    "clone": Recipe("copy", _on(1, torch.clone), _reads(1), 0),
    "cast_to_fp32": Recipe("copy", _cast(True), lambda r, i, s: (r * i * min(s, 2), r * i * 4), 0),
    "cast_from_fp32": Recipe("copy", _cast(False), lambda r, i, s: (r * i * 4, r * i * min(s, 2)), 0),
    "transpose": Recipe(
        "copy", _on(1, lambda x: x.t().contiguous()), _reads(1), 0, reach=_single, strided=True
    ),
    "permute_heads": Recipe("copy", _permute_heads, _reads(1), 0, reach=_head),
    "to_channels_last": Recipe("copy", _to_channels_last, _reads(1), 0, reach=_single, strided=True),
    "cat": Recipe("copy", _cat, _reads(1), 0, reach=lambda rows, inner: inner // 2),
    "slice": Recipe("copy", _slice, _reads(1), 0, reach=_row),
    "adamw_fused": Recipe(
        "optimizer", _optimizer(lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True)), _reads(4, 3), 15
    ),
    "adamw_foreach": Recipe(
        "optimizer",
        _optimizer(lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=True)),
        _reads(4, 3),
        15,
        kernels=12,
    ),
    "sgd_fused": Recipe(
        "optimizer",
        _optimizer(lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, fused=True)),
        _reads(3, 2),
        4,
    ),
    "sgd_foreach": Recipe(
        "optimizer",
        _optimizer(lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, foreach=True)),
        _reads(3, 2),
        4,
        kernels=3,
    ),
    "clip_grad_norm": Recipe("optimizer", _clip_grad_norm, _reads(2, 1), 3, kernels=4),
}


#: The functions of the microbenchmarks that are not named after theirs.
_FUNCTIONS = {
    "mul_scalar": "mul", "gelu_tanh": "gelu", "add_": "add", "add_row": "add",
    "relu_backward": "threshold_backward", "dropout": "native_dropout", "sum_last": "sum", "sum_first": "sum",
    "sum_all": "sum", "amax_last": "amax", "argmax_last": "argmax", "norm_all": "linalg_vector_norm",
    "layer_norm": "native_layer_norm", "layer_norm_backward": "native_layer_norm_backward",
    "rms_norm": "_fused_rms_norm", "rms_norm_backward": "_fused_rms_norm_backward",
    "batch_norm_nhwc": "native_batch_norm", "batch_norm_nchw": "native_batch_norm",
    "batch_norm_nhwc_backward": "native_batch_norm_backward",
    "batch_norm_nchw_backward": "native_batch_norm_backward", "group_norm": "native_group_norm",
    "softmax": "_softmax", "softmax_backward": "_softmax_backward_data", "log_softmax": "_log_softmax",
    "log_softmax_backward": "_log_softmax_backward_data", "nll_loss": "nll_loss_forward",
    "embedding_backward": "embedding_dense_backward", "max_pool_nhwc": "max_pool2d_with_indices",
    "max_pool_nchw": "max_pool2d_with_indices", "max_pool_nhwc_backward": "max_pool2d_with_indices_backward",
    "average_pool": "mean", "cast_to_fp32": "_to_copy", "cast_from_fp32": "_to_copy",
    "transpose": "clone", "permute_heads": "clone", "to_channels_last": "clone", "slice": "clone",
    "adamw_fused": "fused_adamw", "sgd_fused": "fused_sgd",
}  # fmt: skip


def operation(name: str, rows: int, inner: int, dtype: str) -> Streaming:
    """The operation a microbenchmark runs.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in RECIPES:
        raise UsageError(f"unknown microbenchmark {name!r}", hint=f"Use one of: {', '.join(RECIPES)}.")
    recipe = RECIPES[name]
    read_bytes, write_bytes = recipe.traffic(rows, inner, size_bytes(dtype))
    return Streaming(
        recipe.role,
        rows * inner,
        read_bytes,
        write_bytes,
        dtype=dtype,
        flop_per_element=recipe.flop_per_element,
        inner=recipe.reach(rows, inner),
        strided=recipe.strided,
        kernels=recipe.kernels,
        function=_FUNCTIONS.get(name, name),
    )


def build(name: str, rows: int, inner: int, dtype: str, pool: Pool) -> Call:
    """A call that runs a microbenchmark on fresh pieces of the pool."""
    return RECIPES[name].build(pool, rows, inner, TORCH_DTYPES[dtype])


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
