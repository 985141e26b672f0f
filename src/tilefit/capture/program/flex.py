"""``flex_attention``: one kernel over the blocks of its mask where it is compiled, else its parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tilefit.capture.aten import attention_of
from tilefit.capture.fused import FusedCalls, fused_attention
from tilefit.capture.program.late import changed
from tilefit.emulation.tensor import CudaTensor

_MODULE = "torch.nn.attention.flex_attention"
_UNFUSED = (
    "flex_attention is not compiled: it makes all scores, forward and again backward. "
    "torch.compile(flex_attention) fuses it."
)
_NOTE = "flex_attention is priced as the fused kernel of scaled_dot_product_attention over as many keys."


def emulated(calls: FusedCalls, is_fused: Callable[[], bool]) -> AbstractContextManager[None]:
    """Within the block ``flex_attention`` runs on the emulated GPU.

    Args:
        calls: Records the fused kernel.
        is_fused: Whether it is compiled.
    """

    def change(module: ModuleType) -> None:
        parts: Any = import_module("torch._higher_order_ops.flex_attention")  # the name in it is a function
        # The scores are not kept for the backward pass, which makes them again.
        parts._math_attention_inner = partial(checkpoint, parts._math_attention_inner, use_reentrant=False)

        warn = module._warn_once

        def warned(*args: Any, **kwargs: Any) -> None:
            if not is_fused():
                warn(*args, **kwargs)

        def run(query: Any, key: Any, value: Any, score: Any, mask: Any, scale: float, options: Any) -> Any:
            if calls.autocast.enabled:
                query, key, value = calls.autocast.cast((query, key, value), calls.autocast.dtype)
            if not is_fused():
                calls.notes[_UNFUSED] = None
                return parts.math_attention(query, key, value, score, mask, scale, options)
            return _fused(calls, query, key, value, mask)

        module.flex_attention_hop, module._warn_once = run, warned  # type: ignore[attr-defined]

    return changed({_MODULE: change})


def _fused(calls: FusedCalls, query: Any, key: Any, value: Any, mask: Any) -> Any:
    length, kv_len = query.shape[2], key.shape[2]
    visited = _visited(mask, length, kv_len)
    blocks = -(-length // mask[-3]) * -(-kv_len // mask[-2])
    # As of a triangle of blocks: the fused kernels know of one.
    is_causal = length == kv_len and blocks > 1 and abs(2 * visited - 1) <= mask[-3] / length
    keys = kv_len if is_causal else max(1, round(visited * kv_len))
    op = attention_of(query, key, value, kv_len=keys, is_causal=is_causal)
    calls.notes[_NOTE] = None
    statistics = query.new_empty(query.shape[:3], dtype=torch.float32)
    return fused_attention(calls, op, query, key, value), statistics, statistics


def _visited(mask: Any, length: int, kv_len: int) -> float:
    """The share of the scores' blocks that a block mask has."""
    counts = [mask[2], mask[4]]  # of blocks that are masked in part, and of whole ones
    rows = -(-length // mask[-3])
    known = [each.value.tensor() for each in counts if isinstance(each, CudaTensor) and each.value]
    if len(known) < sum(each is not None for each in counts):
        return 1.0
    visited = sum(float(each.float().mean(dim=(0, 1)).sum()) for each in known if each is not None)
    return min(1.0, visited / float(rows * -(-kv_len // mask[-2])))
