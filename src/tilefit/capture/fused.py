"""Calls that CUDA runs as one fused kernel where a CPU build of PyTorch runs many.

Each is an autograd function on shapes alone: it records what CUDA executes, forward and backward, and
allocates what CUDA allocates. Where tensors have values, :class:`~tilefit.capture.semantic.SemanticMode` puts
them into the results; the gradients are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilefit.capture.aten import check_alike
from tilefit.capture.dtypes import DTYPES
from tilefit.capture.layouts import touched_bytes
from tilefit.ops import (
    BACKWARD_DATA,
    BACKWARD_WEIGHT,
    Attention,
    Gemm,
    Recurrent,
    Streaming,
)
from tilefit.ops.entries import DIMENSIONS, MASK
from tilefit.ops.recurrent import GATES, INFERENCE, TRAINING
from tilefit.rnn.modules import Recurrent as Persistent

if TYPE_CHECKING:
    from tilefit.capture.semantic import SemanticMode


def _empty_like_heads(x: torch.Tensor, width: int) -> torch.Tensor:
    """[batch, heads, length, width] as the fused kernels lay it out: heads beside each other in memory."""
    batch, heads, length = x.shape[:3]
    return x.new_empty((batch, length, heads, width)).transpose(1, 2)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mode: SemanticMode,
        op: Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        out = _empty_like_heads(query, op.value_dim)
        logsumexp = query.new_empty(query.shape[:3], dtype=torch.float32)
        reads = [t for t in (query, key, value, mask) if t is not None]
        mode.recorder.record(op, "aten.scaled_dot_product_attention", reads, [out])
        mode.leave_empty()
        ctx.mode, ctx.op = mode, op
        ctx.save_for_backward(query, key, value, mask, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, mask, out, _ = ctx.saved_tensors
        grads = [_empty_like_heads(t, t.shape[-1]) for t in (query, key, value)]
        op = ctx.op
        backward = replace(op, direction=BACKWARD_DATA)
        reads = [t for t in (grad, query, key, value, out, mask) if t is not None]
        grad_mask = torch.empty_like(mask) if mask is not None and mask.requires_grad else None
        writes = grads if grad_mask is None else [*grads, grad_mask]
        ctx.mode.recorder.record(backward, "aten.scaled_dot_product_attention_backward", reads, writes)
        ctx.mode.zero(writes)
        return (None, None, *grads, grad_mask)


def _unfused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """What ``_scaled_dot_product_attention_math`` (PyTorch, ATen/native/transformers/attention.cpp) runs, but
    for dropout, which is one kernel on CUDA and several elsewhere: fp32 throughout, and under no autocast."""
    with torch._C.DisableTorchFunction():
        half = (scale if scale is not None else query.shape[-1] ** -0.5) ** 0.5
        q, k, v = (t.float() if t.element_size() < 4 else t for t in (query, key, value))
        if enable_gqa:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        scores = (q * half) @ (k.transpose(-2, -1) * half)
        if is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
        if mask is not None:
            scores = scores + mask
        weights = torch.native_dropout(torch.ops.aten._safe_softmax(scores, -1), dropout_p, True)[0]
        return (weights @ v).to(query.dtype)


def _is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether its last dimension is, as the fused kernels want it."""
    return tensor.stride(-1) == 1 or tensor.shape[-1] == 1


def _mask_bytes(mask: torch.Tensor) -> int:
    """Bytes of a mask; of one whose last dimension is not contiguous, once it is."""
    return touched_bytes(mask) if _is_contiguous(mask) else mask.numel() * mask.element_size()


def _why_unfused(*operands: torch.Tensor | None) -> str:
    """What keeps query, key, value and mask from the fused kernels, as :class:`~tilefit.ops.Fallback` has it;
    empty if nothing does."""
    if any(t is not None and t.dim() != 4 for t in operands[:3]):
        return DIMENSIONS
    given = zip(("query", "key", "value", MASK), operands, strict=True)
    return next((name for name, t in given if t is not None and not _is_contiguous(t)), "")


def scaled_dot_product_attention(
    mode: SemanticMode,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The fused kernel, unless CUDA would take the unfused path: other than 4 dimensions, fp64, or an operand
    or mask whose last dimension is not contiguous (PyTorch, ATen/native/transformers/cuda/sdp_utils.cpp)."""

    def unfused() -> torch.Tensor:
        if dropout_p:
            return _unfused(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        # A CPU, where real data is on one, would take a fused kernel of its own.
        with torch._C.DisableTorchFunction(), sdpa_kernel(SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )

    check_alike("an attention", (query, key, value))
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return unfused()
    *batch, seq_len, head_dim = query.shape
    op = Attention(
        batch=batch[0] if batch else 1,
        num_heads=prod(batch[1:]),
        seq_len=seq_len,
        head_dim=head_dim,
        kv_len=key.shape[-2],
        num_kv_heads=key.shape[1] if query.dim() == key.dim() == 4 else 0,
        value_dim=value.shape[-1],
        is_causal=is_causal,
        mask_bytes=0 if attn_mask is None else _mask_bytes(attn_mask),
        dropout_p=dropout_p,
        dtype=DTYPES[query.dtype],
    )
    reason = _why_unfused(query, key, value, attn_mask)
    if reason:
        with mode.recorder.sites.falling_back(op, reason):
            return unfused()
    return _FusedAttention.apply(mode, op, query, key, value, attn_mask)  # type: ignore[no-untyped-call]


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mode: SemanticMode,
        op: Recurrent,
        output_shape: Sequence[int],
        *tensors: torch.Tensor,
    ) -> Any:
        x = tensors[0]
        output = x.new_empty(output_shape)
        layers = op.num_layers * op.directions
        state = x.new_empty((layers, op.batch, op.output_size))
        cell = x.new_empty((layers, op.batch, op.hidden_size)) if op.mode == "LSTM" else None
        # What cuDNN reserves for the backward pass: the gates (and the cell) of every step.
        per_step = (op.gates + (1 if op.mode == "LSTM" else 0)) * op.hidden_size
        reserve = x.new_empty(layers * op.seq_len * op.batch * per_step)
        mode.recorder.record(op, f"aten.{op.mode.lower()}", tensors, [output])
        mode.leave_empty()
        ctx.mode, ctx.op = mode, op
        ctx.save_for_backward(*tensors, output, reserve)
        return (output, state, cell) if cell is not None else (output, state)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *state_grads: torch.Tensor) -> Any:
        *tensors, output, reserve = ctx.saved_tensors
        grads = [
            torch.empty_like(t) if needed else None
            for t, needed in zip(tensors, ctx.needs_input_grad[3:], strict=True)
        ]
        record, op = ctx.mode.recorder.record, ctx.op
        for direction in (BACKWARD_DATA, BACKWARD_WEIGHT):
            record(
                replace(op, direction=direction),
                f"aten.{op.mode.lower()}_backward",
                [grad, reserve, *(tensors if direction == BACKWARD_DATA else (tensors[0], output))],
                [g for g in (grads[:1] if direction == BACKWARD_DATA else grads[1:]) if g is not None],
                direction,
            )
        ctx.mode.zero([g for g in grads if g is not None])
        return (None, None, None, *grads)


def _recurrent(mode_name: str) -> Callable[..., Any]:
    """The replacement of ``torch.lstm`` and its like, which cuDNN runs as one call."""

    def replacement(mode: SemanticMode, *args: Any) -> Any:
        # (input, hx, weights, biases, layers, dropout, train, bidirectional, batch_first), or with a
        # PackedSequence (data, batch_sizes, hx, weights, biases, layers, dropout, train, bidirectional).
        packed = isinstance(args[3], (list, tuple))
        if packed:
            x, batch_sizes, hx, weights, _, layers, _, _, bidirectional = args
            steps, batch = len(batch_sizes), int(batch_sizes[0])
            batch_first = False
        else:
            x, hx, weights, _, layers, _, _, bidirectional, batch_first = args
            batch, steps = (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])
        states = list(hx) if isinstance(hx, (list, tuple)) else [hx]
        persistent = mode.recorder.sites.is_running(Persistent)
        if mode.autocast.enabled:
            # cuDNN's always in fp16, whatever the region's type (PyTorch, ATen/cudnn/AutocastRNN.cpp; seen on
            # 2.11).
            to = mode.autocast.dtype if persistent else torch.float16
            x, states, weights = mode.autocast.cast((x, states, list(weights)), to)
        dtype = DTYPES[x.dtype]
        if mode.autocast.enabled and dtype == "bf16":
            dtype = "fp16"  # what cuDNN would take decides who runs it, and both kernels take as long
        hidden = weights[1].shape[0] // GATES[mode_name]
        projected = weights[1].shape[1]
        op = Recurrent(
            mode=mode_name,
            input_size=x.shape[-1],
            hidden_size=hidden,
            seq_len=steps,
            batch=batch,
            num_layers=layers,
            bidirectional=bidirectional,
            proj_size=projected if projected != hidden else 0,
            packed=packed,
            dtype="tf32" if dtype == "fp32" and mode.recorder.tf32_conv else dtype,
            persistent=_purpose(x, *states, *weights) if persistent else "",
        )
        shape = (*x.shape[:-1], op.directions * op.output_size)
        return _Recurrence.apply(mode, op, shape, x, *states, *weights)  # type: ignore[no-untyped-call]

    return replacement


def _purpose(*tensors: torch.Tensor) -> str:
    """What a layer of :mod:`tilefit.nn` is for, as :class:`~tilefit.ops.Recurrent` names it."""
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return TRAINING if differentiated else INFERENCE


def recurrent_layer(
    mode: SemanticMode,
    x: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None,
    b_hh: torch.Tensor | None,
    h0: torch.Tensor | None,
    c0: torch.Tensor | None,
    lengths: torch.Tensor | None,
    reset: torch.Tensor | None,
    cell: str,
    *options: str,
) -> Any:
    """One layer of :mod:`tilefit.nn`, called as its operator (see :mod:`tilefit.rnn.operator`)."""
    steps, batch, inputs = x.shape
    directions, _, hidden = w_hh.shape
    dtype = DTYPES[x.dtype]
    tensors = [t for t in (x, w_ih, w_hh, b_ih, b_hh, h0, c0) if t is not None]
    op = Recurrent(
        mode=cell.upper(),
        input_size=inputs,
        hidden_size=hidden,
        seq_len=steps,
        batch=batch,
        bidirectional=directions == 2,
        packed=lengths is not None,
        dtype="tf32" if dtype == "fp32" and mode.recorder.tf32_conv else dtype,
        persistent=_purpose(*tensors),
    )
    shape = (steps, batch, directions, hidden)
    out, *states = _Recurrence.apply(mode, op, shape, *tensors)  # type: ignore[no-untyped-call]
    # What the operator saves for backward, this autograd function has saved already.
    empty = x.new_empty(0)
    return (out, *states, *[empty] * (4 - len(states)))


class _CellPointwise(torch.autograd.Function):
    """The gates of a recurrent cell: one fused kernel over the two products."""

    @staticmethod
    def forward(ctx: Any, mode: SemanticMode, states: int, gates: torch.Tensor, *rest: torch.Tensor) -> Any:
        hidden = rest[-1]
        outputs = tuple(torch.empty_like(hidden) for _ in range(states))
        _record_pointwise(mode, "aten._thnn_fused_cell", (gates, *rest), outputs)
        mode.leave_empty()
        ctx.mode = mode
        ctx.save_for_backward(gates, *rest)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        results = [torch.empty_like(t) for t in saved]
        _record_pointwise(ctx.mode, "aten._thnn_fused_cell_backward", (*grads, *saved), results)
        ctx.mode.zero(results)
        return (None, None, *results)


def _record_pointwise(
    mode: SemanticMode, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
) -> None:
    largest = max((*reads, *writes), key=lambda t: t.numel())
    op = Streaming(
        "pointwise",
        largest.numel(),
        sum(map(touched_bytes, reads)),
        sum(map(touched_bytes, writes)),
        DTYPES[largest.dtype],
        flop_per_element=5,
    )
    mode.recorder.record(op, name, reads, writes)


def _cell(states: int) -> Callable[..., Any]:
    def replacement(
        mode: SemanticMode,
        x: torch.Tensor,
        hx: Any,
        w_ih: torch.Tensor,
        w_hh: torch.Tensor,
        b_ih: torch.Tensor | None = None,
        b_hh: torch.Tensor | None = None,
    ) -> Any:
        hidden = list(hx) if isinstance(hx, (list, tuple)) else [hx]
        of_input = torch.nn.functional.linear(x, w_ih)
        of_state = torch.nn.functional.linear(hidden[0], w_hh)
        biases = [b for b in (b_ih, b_hh) if b is not None]
        outputs = _CellPointwise.apply(mode, states, of_input, of_state, *biases, *hidden)  # type: ignore[no-untyped-call]
        return outputs if states > 1 else outputs[0]

    return replacement


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mode: SemanticMode, rows: int, x: torch.Tensor, weight: torch.Tensor | None) -> Any:
        out = torch.empty_like(x)
        rstd = x.new_empty(rows, dtype=torch.float32)
        reads = [t for t in (x, weight) if t is not None]
        _record_normalization(mode, "aten._fused_rms_norm", x.numel() // max(1, rows), reads, [out])
        mode.leave_empty()
        ctx.mode, ctx.rows = mode, rows
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        reads = [t for t in (grad, x, rstd, weight) if t is not None]
        writes = [torch.empty_like(t) for t in (x, weight) if t is not None]
        inner = x.numel() // max(1, ctx.rows)
        _record_normalization(ctx.mode, "aten._fused_rms_norm_backward", inner, reads, writes)
        ctx.mode.zero(writes)
        return None, None, writes[0], writes[1] if weight is not None else None


def _record_normalization(
    mode: SemanticMode, name: str, inner: int, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
) -> None:
    op = Streaming(
        "normalization",
        reads[0].numel(),
        sum(map(touched_bytes, reads)),
        sum(map(touched_bytes, writes)),
        DTYPES[reads[0].dtype],
        flop_per_element=5,
        inner=inner,
    )
    mode.recorder.record(op, name, reads, writes)


def rms_norm(
    mode: SemanticMode,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """On CUDA, one kernel forward and one backward; a CPU build decomposes it."""
    rows = x.numel() // max(1, prod(normalized_shape))
    return _RmsNorm.apply(mode, rows, x, weight)  # type: ignore[no-untyped-call]


class _GroupedProduct(torch.autograd.Function):
    """One product per expert over rows sorted by expert, taken to be shared out evenly."""

    @staticmethod
    def forward(ctx: Any, mode: SemanticMode, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        experts, k, n = b.shape
        rows = max(1, a.shape[0] // experts)
        dtype = DTYPES[a.dtype]
        dtype = "tf32" if dtype == "fp32" and mode.recorder.tf32_matmul else dtype
        out = a.new_empty((a.shape[0], n))
        layout = "NN" if b.stride(-1) == 1 else "TN"
        product = Gemm(rows, n, k, dtype, layout, batch=experts)
        mode.recorder.record(product, "aten._grouped_mm", (a, b), (out,))
        mode.leave_empty()
        ctx.mode, ctx.product = mode, product
        ctx.save_for_backward(a, b)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        m, n, k = ctx.product.m, ctx.product.n, ctx.product.k
        record = ctx.mode.recorder.record
        grad_a, grad_b = torch.empty_like(a), torch.empty_like(b)
        letter = "T" if ctx.product.layout == "NN" else "N"
        of_data = replace(ctx.product, n=k, k=n, layout=letter + "N")
        of_weight = replace(ctx.product, m=k, n=n, k=m, layout="NT")
        record(of_data, "aten._grouped_mm_backward", (grad, b), (grad_a,), BACKWARD_DATA)
        record(of_weight, "aten._grouped_mm_backward", (grad, a), (grad_b,), BACKWARD_WEIGHT)
        ctx.mode.zero([grad_a, grad_b])
        return None, grad_a, grad_b


def grouped_mm(mode: SemanticMode, a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Rows by expert times a stack of weights; other forms go their own way."""
    if a.dim() != 2 or b.dim() != 3:
        return NotImplemented
    return _GroupedProduct.apply(mode, a, b)  # type: ignore[no-untyped-call]


def dropout(mode: SemanticMode, x: torch.Tensor, p: float = 0.5, train: bool = True) -> Any:
    """On CUDA, dropout is one kernel that also keeps the mask."""
    if not train or p in (0.0, 1.0) or x.numel() == 0:
        return NotImplemented
    return torch.native_dropout(x, p, train)[0]


def padding_is_last(mode: SemanticMode, *args: Any) -> bool:
    """Whether padded tokens come last: then ``nn.TransformerEncoder`` leaves them out (nested tensors).

    How many they are depends on values, so here it computes them, as it does where they are elsewhere.
    """
    mode.notes["nn.TransformerEncoder computes padded tokens here; on a GPU it may leave them out."] = None
    return False


#: Replacements by the name of the function PyTorch calls; each may return ``NotImplemented``.
REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "lstm": _recurrent("LSTM"),
    "gru": _recurrent("GRU"),
    "rnn_tanh": _recurrent("RNN_TANH"),
    "rnn_relu": _recurrent("RNN_RELU"),
    "recurrent.default": recurrent_layer,
    "lstm_cell": _cell(2),
    "gru_cell": _cell(1),
    "dropout": dropout,
    "_nested_tensor_from_mask_left_aligned": padding_is_last,
    "rms_norm": rms_norm,
    "_grouped_mm": grouped_mm,
    "grouped_mm": grouped_mm,
}
