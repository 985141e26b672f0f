"""``flex_attention``: one kernel over the blocks of its mask where it is compiled, else its parts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from tilefit.capture.aten import attention_of
from tilefit.capture.fused import FusedCalls, fused_attention
from tilefit.emulation.tensor import CudaTensor

MODULE = "torch.nn.attention.flex_attention"
_UNFUSED = (
    "flex_attention is not compiled: it makes all scores, forward and again backward. "
    "torch.compile(flex_attention) fuses it."
)
_NOTE = "flex_attention is priced as the fused kernel of scaled_dot_product_attention over as many keys."


def emulate(calls: FusedCalls, is_fused: Callable[[], bool], module: ModuleType) -> None:
    """Have ``flex_attention`` run on the emulated GPU from now on.

    Args:
        calls: Records the fused kernel.
        is_fused: Whether it is compiled.
        module: :data:`MODULE`.
    """
    parts: Any = import_module("torch._higher_order_ops.flex_attention")  # the name in it is a function
    # The scores are not kept for the backward pass, which makes them again.
    parts._math_attention_inner = partial(checkpoint, parts._math_attention_inner, use_reentrant=False)
    warn: Any = vars(module)["_warn_once"]

    def warned(*args: Any, **kwargs: Any) -> None:
        if not is_fused():
            warn(*args, **kwargs)

    def run(query: Any, key: Any, value: Any, score: Any, mask: Any, scale: float, options: Any) -> Any:
        if is_fused():
            return _fused(calls, _visited, query, key, value, mask)
        calls.notes[_UNFUSED] = None
        query, key, value = _cast(calls, query, key, value)
        return parts.math_attention(query, key, value, score, mask, scale, options)

    vars(module).update(flex_attention_hop=run, _warn_once=warned)


@contextmanager
def on_shapes(calls: FusedCalls) -> Iterator[None]:
    """Within the block ``flex_attention`` runs on shapes alone, compiled, as it is wherever it is used."""

    def run(query: Any, key: Any, value: Any, score: Any, mask: Any, scale: float, options: Any) -> Any:
        return _fused(calls, _sampled, query, key, value, mask)

    module = sys.modules.get(MODULE)
    own: dict[str, Any] = dict.fromkeys(("_warn_once", "_validate_device"), lambda *args, **kwargs: None)
    own["flex_attention_hop"] = run
    with patch.multiple(module, **own) if module else nullcontext():
        yield


def _cast(calls: FusedCalls, *tensors: Any) -> Any:
    return calls.autocast.cast(tensors, calls.autocast.dtype) if calls.autocast.enabled else tensors


def _fused(calls: FusedCalls, share: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
    query, key, value = _cast(calls, query, key, value)
    length, kv_len = query.shape[2], key.shape[2]
    visited = share(mask, length, kv_len)
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


def _sampled(mask: Any, length: int, kv_len: int) -> float:
    """The same of a mask whose tensors have no values: asked at both ends and in the middle of each block."""
    q, kv = (
        torch.cat([torch.arange(at, size, block) for at in (0, block // 2, block - 1)])
        for size, block in ((length, min(length, mask[-3])), (kv_len, min(kv_len, mask[-2])))
    )
    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            zero = q.new_zeros(())
            seen = torch.as_tensor(mask[-1](zero, zero, q[:, None], kv[None])).expand(len(q), len(kv))
            blocks = torch.zeros(-(-length // mask[-3]), -(-kv_len // mask[-2]))
            at = (q // mask[-3])[:, None].expand_as(seen), (kv // mask[-2])[None].expand_as(seen)
            visited = blocks.index_put(at, seen.float(), accumulate=True).bool().float().mean()
            return 1.0 if seen.is_meta else float(visited)
    except (RuntimeError, NotImplementedError, TypeError, IndexError):  # of what has no values either
        return 1.0
