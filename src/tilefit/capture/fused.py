"""Calls that CUDA runs as one fused kernel where a CPU build of PyTorch runs many.

Each is a kernel of one autograd function on shapes alone: it records what CUDA executes, forward and
backward, and allocates what CUDA allocates. Where tensors have values, :class:`FusedCalls` puts them into the
results; the gradients are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_map

from tilefit.capture.aten import attention_of, check_alike, streaming_of
from tilefit.capture.autocast import AutocastState, cross_entropy
from tilefit.capture.dtypes import product_dtype
from tilefit.capture.layouts import touched_bytes
from tilefit.capture.recorder import Recorder
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, Attention, Gemm, Op, Recurrent
from tilefit.ops.entries import DIMENSIONS, MASK
from tilefit.ops.recurrent import GATES, INFERENCE, TRAINING
from tilefit.rnn.modules import Recurrent as Persistent


class FusedCalls:
    """The calls that are replaced, and what a replacement leaves behind.

    Args:
        recorder: Receives their operations.
        autocast: The simulated autocast.
    """

    def __init__(self, recorder: Recorder, autocast: AutocastState) -> None:
        self.recorder = recorder
        self.autocast = autocast
        #: What was assumed, each once.
        self.notes: dict[str, None] = {}
        self._has_values = recorder.device != "meta"
        self._empty = False

    def leave_empty(self) -> None:
        """Told by a replacement that its result was recorded, not computed."""
        self._empty = self._has_values

    def fill(self, result: Any, func: Any, args: Any, kwargs: Any) -> None:
        """Compute a result that was only recorded: code that depends on values is to see the true ones."""
        if not self._empty:
            return
        self._empty = False
        with torch._C.DisableTorchFunction(), self.recorder.silent(), torch.no_grad():
            # In single precision, since the CPU has not all of these in half.
            values = func(*tree_map(_single, args), **tree_map(_single, kwargs))
            for empty, value in zip(tree_flatten(result)[0], tree_flatten(values)[0], strict=True):
                if empty.shape == value.shape:  # else it is a part of what is kept for the backward pass
                    empty.data.copy_(value)

    def zero(self, gradients: Iterable[torch.Tensor]) -> None:
        """Make gradients that were only recorded harmless, where tensors have values."""
        if self._has_values:
            with torch._C.DisableTorchFunction(), self.recorder.silent():
                for gradient in gradients:
                    gradient.zero_()


def _single(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half else value


def _empty_like_heads(x: torch.Tensor, width: int) -> torch.Tensor:
    """[batch, heads, length, width] as the fused kernels lay it out: in half precision as ``x`` is (PyTorch,
    ATen/native/cudnn/MHA.cpp, transformers/cuda/flash_attn), else heads beside each other in memory."""
    batch, heads, length = x.shape[:3]
    if x.element_size() == 2 and width == x.shape[3]:
        return torch.empty_like(x)
    return x.new_empty((batch, length, heads, width)).transpose(1, 2)


class _Kernel(Protocol):
    """What CUDA runs for a call, forward and backward."""

    def forward(self, recorder: Recorder, *operands: Any) -> tuple[Any, Sequence[torch.Tensor]]:
        """Record it; what it makes, and what it keeps for the backward pass beside its operands."""

    def backward(self, ctx: Any, grads: Any, *kept: Any) -> Sequence[torch.Tensor | None]:
        """Record the operands' gradients; ``kept`` are the operands and what was kept beside them."""


class _Recorded(torch.autograd.Function):
    """A call that is recorded, and whose results are left empty."""

    @staticmethod
    def forward(ctx: Any, calls: FusedCalls, kernel: _Kernel, *operands: Any) -> Any:
        made, kept = kernel.forward(calls.recorder, *operands)
        calls.leave_empty()
        ctx.calls, ctx.kernel, ctx.recorder = calls, kernel, calls.recorder
        ctx.save_for_backward(*operands, *kept)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        made = ctx.kernel.backward(ctx, grads, *ctx.saved_tensors)
        ctx.calls.zero(_given(made))
        return (None, None, *made)


def _recorded(calls: FusedCalls, kernel: _Kernel, *operands: Any) -> Any:
    return _Recorded.apply(calls, kernel, *operands)  # type: ignore[no-untyped-call]


def _given(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    return [t for t in tensors if t is not None]


@dataclass(frozen=True, slots=True)
class _FusedAttention:
    op: Attention

    def forward(self, recorder: Recorder, query: torch.Tensor, *others: Any) -> Any:
        out = _empty_like_heads(query, self.op.value_dim)
        logsumexp = query.new_empty(query.shape[:3], dtype=torch.float32)
        recorder.record(self.op, "aten.scaled_dot_product_attention", _given((query, *others)), [out])
        return out, (out, logsumexp)

    def backward(self, ctx: Any, grads: Any, *kept: Any) -> Sequence[torch.Tensor | None]:
        *operands, mask, out, _ = kept
        made = [_empty_like_heads(t, t.shape[-1]) for t in operands]
        grad_mask = torch.empty_like(mask) if mask is not None and mask.requires_grad else None
        op = replace(self.op, direction=BACKWARD_DATA)
        reads, writes = _given((*grads, *operands, out, mask)), _given((*made, grad_mask))
        ctx.recorder.record(op, "aten.scaled_dot_product_attention_backward", reads, writes)
        return (*made, grad_mask)


def _unfused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None = None,
    enable_gqa: bool = False,
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
    calls: FusedCalls,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,  # scale, enable_gqa
) -> Any:
    """The fused kernel, unless CUDA would take the unfused path: other than 4 dimensions, fp64, or an operand
    or mask whose last dimension is not contiguous (PyTorch, ATen/native/transformers/cuda/sdp_utils.cpp)."""

    def unfused() -> torch.Tensor:
        if dropout_p:
            return _unfused(query, key, value, attn_mask, dropout_p, is_causal, **options)
        # A CPU, where real data is on one, would take a fused kernel of its own.
        with torch._C.DisableTorchFunction(), sdpa_kernel(SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, **options
            )

    check_alike("an attention", (query, key, value))
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return unfused()
    mask_bytes = 0 if attn_mask is None else _mask_bytes(attn_mask)
    op = attention_of(query, key, value, is_causal=is_causal, mask_bytes=mask_bytes, dropout_p=dropout_p)
    reason = _why_unfused(query, key, value, attn_mask)
    if reason:
        with calls.recorder.sites.falling_back(op, reason):
            return unfused()
    return fused_attention(calls, op, query, key, value, attn_mask)


def fused_attention(
    calls: FusedCalls,
    op: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> Any:
    """Record an attention as one kernel, forward and backward; returns what it makes."""
    return _recorded(calls, _FusedAttention(op), query, key, value, mask)


@dataclass(frozen=True, slots=True)
class _Recurrence:
    op: Recurrent
    output_shape: Sequence[int]

    def forward(self, recorder: Recorder, x: torch.Tensor, *others: torch.Tensor) -> Any:
        op = self.op
        output = x.new_empty(self.output_shape)
        layers = op.num_layers * op.directions
        states = [x.new_empty((layers, op.batch, op.output_size))]
        if op.mode == "LSTM":
            states.append(x.new_empty((layers, op.batch, op.hidden_size)))
        # What cuDNN reserves for the backward pass: the gates (and the cell) of every step.
        per_step = (op.gates + len(states) - 1) * op.hidden_size
        reserve = x.new_empty(layers * op.all_rows * per_step)
        recorder.record(op, f"aten.{op.mode.lower()}", (x, *others), [output])
        return (output, *states), (output, reserve)

    def backward(self, ctx: Any, grads: Any, *kept: Any) -> Sequence[torch.Tensor | None]:
        *tensors, output, reserve = kept
        needed = zip(tensors, ctx.needs_input_grad[2:], strict=True)
        made = [torch.empty_like(t) if is_needed else None for t, is_needed in needed]
        for direction, reads, writes in (
            (BACKWARD_DATA, tensors, made[:1]),
            (BACKWARD_WEIGHT, [tensors[0], output], made[1:]),
        ):
            op = replace(self.op, direction=direction)
            name = f"aten.{op.mode.lower()}_backward"
            ctx.recorder.record(op, name, [grads[0], reserve, *reads], _given(writes), direction)
        return made


def _recurrent(mode_name: str, calls: FusedCalls, *args: Any) -> Any:
    """``torch.lstm`` and its like, which cuDNN runs as one call."""
    # (input, hx, weights, biases, layers, dropout, train, bidirectional, batch_first), or with a
    # PackedSequence (data, batch_sizes, hx, weights, biases, layers, dropout, train, bidirectional).
    packed = isinstance(args[3], (list, tuple))
    if packed:
        x, batch_sizes, hx, weights, _, layers, dropout, train, bidirectional = args
        steps, batch = len(batch_sizes), int(batch_sizes[0])
        batch_first = False
    else:
        x, hx, weights, _, layers, dropout, train, bidirectional, batch_first = args
        batch, steps = (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])
    states = list(hx) if isinstance(hx, (list, tuple)) else [hx]
    persistent = calls.recorder.sites.is_running(Persistent)
    if calls.autocast.enabled:
        # cuDNN's always in fp16, whatever the region's type (PyTorch, ATen/cudnn/AutocastRNN.cpp; seen on
        # 2.11).
        to = calls.autocast.dtype if persistent else torch.float16
        x, states, weights = calls.autocast.cast((x, states, list(weights)), to)
    dtype = product_dtype(x.dtype, calls.recorder.tf32_conv)
    if calls.autocast.enabled and dtype == "bf16":
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
        rows=x.shape[0] if packed else 0,
        dropout=bool(train and dropout and layers > 1),
        dtype=dtype,
        persistent=_purpose(x, *states, *weights) if persistent else "",
    )
    shape = (*x.shape[:-1], op.directions * op.output_size)
    return _recorded(calls, _Recurrence(op, shape), x, *states, *weights)


def _purpose(*tensors: torch.Tensor) -> str:
    """What a layer of :mod:`tilefit.nn` is for, as :class:`~tilefit.ops.Recurrent` names it."""
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return TRAINING if differentiated else INFERENCE


def recurrent_layer(calls: FusedCalls, *args: Any) -> Any:
    """One layer of :mod:`tilefit.nn`; ``args`` are those of its operator, in :mod:`tilefit.rnn.operator`."""
    x, _, w_hh, *_, lengths, _reset, cell = args[:10]
    steps, batch, inputs = x.shape
    directions, _, hidden = w_hh.shape
    tensors = [t for t in args[:7] if t is not None]
    op = Recurrent(
        mode=cell.upper(),
        input_size=inputs,
        hidden_size=hidden,
        seq_len=steps,
        batch=batch,
        bidirectional=directions == 2,
        packed=lengths is not None,
        dtype=product_dtype(x.dtype, calls.recorder.tf32_conv),
        persistent=_purpose(*tensors),
    )
    shape = (steps, batch, directions, hidden)
    out, *states = _recorded(calls, _Recurrence(op, shape), *tensors)
    # What the operator saves for backward, this autograd function has saved already.
    empty = x.new_empty(0)
    return (out, *states, *[empty] * (4 - len(states)))


@dataclass(frozen=True, slots=True)
class _CellPointwise:
    """The gates of a recurrent cell: one fused kernel over the two products."""

    states: int

    def forward(self, recorder: Recorder, *operands: torch.Tensor) -> Any:
        outputs = tuple(torch.empty_like(operands[-1]) for _ in range(self.states))
        op = streaming_of("pointwise", operands, outputs, flop_per_element=5)
        recorder.record(op, "aten._thnn_fused_cell", operands, outputs)
        return outputs, ()

    def backward(self, ctx: Any, grads: Any, *kept: Any) -> Sequence[torch.Tensor | None]:
        made, reads = [torch.empty_like(t) for t in kept], (*grads, *kept)
        op = streaming_of("pointwise", reads, made, flop_per_element=5)
        ctx.recorder.record(op, "aten._thnn_fused_cell_backward", reads, made)
        return made


def _cell(
    states: int,
    calls: FusedCalls,
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
    outputs = _recorded(calls, _CellPointwise(states), of_input, of_state, *_given((b_ih, b_hh)), *hidden)
    return outputs if states > 1 else outputs[0]


@dataclass(frozen=True, slots=True)
class _RmsNorm:
    rows: int

    def forward(self, recorder: Recorder, x: torch.Tensor, weight: torch.Tensor | None) -> Any:
        out, reads = torch.empty_like(x), _given((x, weight))
        rstd = x.new_empty(self.rows, dtype=torch.float32)
        recorder.record(self._op(x, reads, [out]), "aten._fused_rms_norm", reads, [out])
        return out, (rstd,)

    def backward(self, ctx: Any, grads: Any, *kept: Any) -> Sequence[torch.Tensor | None]:
        x, weight, rstd = kept
        made = [None if t is None else torch.empty_like(t) for t in (x, weight)]
        reads, writes = _given((*grads, x, rstd, weight)), _given(made)
        ctx.recorder.record(self._op(x, reads, writes), "aten._fused_rms_norm_backward", reads, writes)
        return made

    def _op(self, x: torch.Tensor, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> Op:
        inner = x.numel() // max(1, self.rows)
        return streaming_of("normalization", reads, writes, flop_per_element=5, inner=inner)


def rms_norm(
    calls: FusedCalls,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """On CUDA, one kernel forward and one backward; a CPU build decomposes it."""
    rows = x.numel() // max(1, prod(normalized_shape))
    return _recorded(calls, _RmsNorm(rows), x, weight)


@dataclass(frozen=True, slots=True)
class _GroupedProduct:
    """One product per expert over rows sorted by expert, taken to be shared out evenly."""

    product: Gemm

    def forward(self, recorder: Recorder, a: torch.Tensor, b: torch.Tensor) -> Any:
        out = a.new_empty((a.shape[0], b.shape[-1]))
        recorder.record(self.product, "aten._grouped_mm", (a, b), (out,))
        return out, ()

    def backward(self, ctx: Any, grads: Any, *kept: Any) -> Sequence[torch.Tensor | None]:
        (grad,), (a, b) = grads, kept
        m, n, k = self.product.m, self.product.n, self.product.k
        record = ctx.recorder.record
        grad_a, grad_b = torch.empty_like(a), torch.empty_like(b)
        letter = "T" if self.product.layout == "NN" else "N"
        of_data = replace(self.product, n=k, k=n, layout=letter + "N")
        of_weight = replace(self.product, m=k, n=n, k=m, layout="NT")
        record(of_data, "aten._grouped_mm_backward", (grad, b), (grad_a,), BACKWARD_DATA)
        record(of_weight, "aten._grouped_mm_backward", (grad, a), (grad_b,), BACKWARD_WEIGHT)
        return grad_a, grad_b


def grouped_mm(calls: FusedCalls, a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Rows by expert times a stack of weights; other forms go their own way."""
    if a.dim() != 2 or b.dim() != 3:
        return NotImplemented
    experts, k, n = b.shape
    dtype = product_dtype(a.dtype, calls.recorder.tf32_matmul)
    layout = "NN" if b.stride(-1) == 1 else "TN"
    product = Gemm(max(1, a.shape[0] // experts), n, k, dtype, layout, batch=experts)
    return _recorded(calls, _GroupedProduct(product), a, b)


def dropout(calls: FusedCalls, x: torch.Tensor, p: float = 0.5, train: bool = True) -> Any:
    """On CUDA, dropout is one kernel that also keeps the mask."""
    if not train or p in (0.0, 1.0) or x.numel() == 0:
        return NotImplemented
    return torch.native_dropout(x, p, train)[0]


def padding_is_last(calls: FusedCalls, *args: Any) -> bool:
    """Whether padded tokens come last: then ``nn.TransformerEncoder`` leaves them out (nested tensors).

    How many they are depends on values, so here it computes them, as it does where they are elsewhere.
    """
    calls.notes["nn.TransformerEncoder computes padded tokens here; on a GPU it may leave them out."] = None
    return False


def autocast_cross_entropy(calls: FusedCalls, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``F.cross_entropy`` under autocast; PyTorch's own outside of it, or of fp32 logits."""
    if not calls.autocast.enabled or logits.dtype not in (torch.float16, torch.bfloat16):
        return NotImplemented
    return cross_entropy(logits, *args, **kwargs)


#: Replacements by the name of the function PyTorch calls; each may return ``NotImplemented``.
REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": scaled_dot_product_attention,
    **{mode.lower(): partial(_recurrent, mode) for mode in GATES},
    "recurrent.default": recurrent_layer,
    "cross_entropy_loss": autocast_cross_entropy,
    "lstm_cell": partial(_cell, 2),
    "gru_cell": partial(_cell, 1),
    "dropout": dropout,
    "_nested_tensor_from_mask_left_aligned": padding_is_last,
    "rms_norm": rms_norm,
    "_grouped_mm": grouped_mm,
    "grouped_mm": grouped_mm,
}
