"""Attention over tensors whose samples are spread over processes along the sequence: ``context_parallel``.

The ring, what it exchanges and how it merges its parts are PyTorch's own code; each of its kernels is
recorded as the attention that it is.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import distributed

from tilefit.capture.aten import attention_of
from tilefit.capture.fused import FusedCalls
from tilefit.ops import BACKWARD_DATA

#: Along this dimension of [batch, heads, length, width].
LENGTH = 2
#: Where the ring is, by version of PyTorch.
_MODULES = ("_context_parallel._attention", "_attention")


def ring() -> Any:
    """PyTorch's module of it; None where this version has none that is known."""
    for name in _MODULES:
        try:
            found = import_module(f"torch.distributed.tensor.experimental.{name}")
        except ImportError:
            continue
        if hasattr(found, "_templated_ring_attention_backward"):
            return found
    return None


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, calls: FusedCalls, group: distributed.ProcessGroup, is_causal: bool, *operands: Any
    ) -> torch.Tensor:
        out, logsumexp = ring()._templated_ring_attention(
            group, LENGTH, partial(_forward, calls), *operands, is_causal=is_causal
        )
        ctx.call = calls, group, is_causal
        ctx.save_for_backward(*operands, out, logsumexp)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        calls, group, is_causal = ctx.call
        grads = ring()._templated_ring_attention_backward(
            group, LENGTH, partial(_backward, calls), grad, "grad_out", *ctx.saved_tensors, is_causal
        )
        return None, None, None, *grads


def _forward(
    calls: FusedCalls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A kernel of the ring's forward pass: what it gives, and the logarithms of its sums."""
    out = query.new_empty((*query.shape[:3], value.shape[-1]))
    logsumexp = query.new_empty(query.shape[:3], dtype=torch.float32)
    op = attention_of(query, key, value, is_causal=is_causal)
    calls.recorder.record(op, "aten.scaled_dot_product_attention", [query, key, value], [out])
    return out, logsumexp


def _backward(
    calls: FusedCalls,
    *,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, ...]:
    """A kernel of its backward pass: the gradients of query, key and value."""
    op = attention_of(query, key, value, is_causal=is_causal, direction=BACKWARD_DATA)
    grads = tuple(torch.empty_like(each) for each in (query, key, value))
    reads = [grad_out, query, key, value, out]
    calls.recorder.record(op, "aten.scaled_dot_product_attention_backward", reads, [*grads])
    return grads


def ring_attention(
    calls: FusedCalls, group: distributed.ProcessGroup, operands: tuple[torch.Tensor, ...], is_causal: bool
) -> torch.Tensor:
    """This process's part of an attention: of its queries, with the keys and values of all.

    Args:
        calls: Records its kernels.
        group: The processes.
        operands: Query, key and value of this process, [batch, heads, length, width].
        is_causal: As of ``scaled_dot_product_attention``.
    """
    made: torch.Tensor = _RingAttention.apply(calls, group, is_causal, *operands)  # type: ignore[no-untyped-call]
    return made
