"""Tensors that are the same in every call: made of numbers alone, or of buffers that nobody writes to.

Such a tensor is known by its *key*: the function that made it, and the keys of its arguments. What was found
out about one tensor, at the price of waiting for the GPU, holds for every other with its key.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch.utils.weak import WeakIdRef

from tilefit.fixes.changes.calls import is_on_gpu

_MAKERS = frozenset("ones zeros full arange eye tensor".split())
_RANDOM = frozenset(
    """rand_like randn_like randint_like bernoulli dropout multinomial normal empty_like new_empty
    native_dropout""".split()
)
#: 1, 1.0 and True are equal, but make different tensors.
_NUMBERS = frozenset((bool, int, float, str, NoneType, EllipsisType, torch.dtype, torch.device))
_MOST_VERDICTS = 4096
_verdicts: dict[Any, bool] = {}
_CHANGED = "a causal mask was changed by .data; take the fix fuse-attention back (plan.undo())"


def found_out(key: Any, look: Callable[[], torch.Tensor]) -> bool:
    """What was seen in the tensor with this key. The first look at it waits for the GPU."""
    if key not in _verdicts:
        if len(_verdicts) >= _MOST_VERDICTS:
            _verdicts.clear()
        _verdicts[key] = bool(look())
    return _verdicts[key]


def may_be_read(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values, and the host may wait for them now."""
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return not tensor.is_meta and not (begun and torch.cuda.is_current_stream_capturing())


class _UnknownError(Exception):
    """An argument that may be another in the next call."""


class Constants:
    """Knows the constants among the tensors of one call.

    Args:
        buffers: Tensors that were there before; each counts as another once it is written to.
    """

    def __init__(self, buffers: Iterable[torch.Tensor] = ()) -> None:
        self._keys: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
        for buffer in buffers:
            if type(buffer) is torch.Tensor and not buffer.is_inference():
                self._know(buffer, (WeakIdRef(buffer), buffer._version))

    def observe(self, func: Any, args: Any, kwargs: Any, result: Any, in_place: bool) -> None:
        """Note a call of PyTorch; ``in_place``: it wrote into its first argument."""
        name = getattr(func, "__name__", "")
        is_made = name in _MAKERS or not self._keys.keys().isdisjoint(map(id, args))
        if not is_made or not isinstance(result, torch.Tensor):
            return
        key = None
        with suppress(_UnknownError):
            key = func, self._key((args, kwargs))
        if in_place:
            self._keys.clear()  # views of the same memory have changed with it
        if key is not None and name not in _RANDOM:
            self._know(result, key)

    def is_causal(self, mask: torch.Tensor, keep: bool, never: float) -> bool:
        """Whether a mask is known to leave each query the keys up to its own position, and only those.

        A mask on ``meta`` is taken to be causal if it is square. One that is made of a buffer is looked at in
        every call, for not every way to write to a buffer can be noticed: on a GPU without waiting for it,
        and if it is another than it was, the GPU reports an assertion that failed.

        Args:
            mask: Bool [..., queries, keys], or floating-point to be added to scores.
            keep: What a bool mask says of those that are left.
            never: A score to which this is added does not count.
        """
        key = self._key_of(mask)
        if key is None or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
            return False
        if not is_on_gpu(mask):
            return mask.is_meta or bool(_is_causal(mask, keep, never))
        if (key, keep) not in _verdicts:
            return may_be_read(mask) and found_out((key, keep), lambda: _is_causal(mask, keep, never))
        if _verdicts[key, keep] and _is_of_buffer(key):
            torch._assert_async(_is_causal(mask, keep, never), _CHANGED)
        return _verdicts[key, keep]

    def number(self, tensor: torch.Tensor) -> float | None:
        """The value of a tensor of one element, where that is known without waiting for a GPU."""
        if tensor.numel() != 1:
            return None
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and not tensor.requires_grad:
            return float(tensor)
        match self._key_of(tensor) if tensor.is_floating_point() else None:
            case (torch.full | torch.tensor, ((*_, (_, int() | float() as fill)), _)):
                return float(fill)
        return None

    def _know(self, tensor: torch.Tensor, key: Any) -> None:
        self._keys[id(tensor)] = (weakref.ref(tensor), key)

    def _key_of(self, tensor: torch.Tensor) -> Any:
        ref, key = self._keys.get(id(tensor), (None, None))
        return key if ref is not None and ref() is tensor else None

    def _key(self, tree: Any) -> Any:
        if type(tree) in _NUMBERS:
            return type(tree), tree
        if isinstance(tree, (list, tuple)):
            return tuple(map(self._key, tree))
        if isinstance(tree, dict):
            return tuple((name, self._key(value)) for name, value in sorted(tree.items()))
        if isinstance(tree, slice):
            return self._key((tree.start, tree.stop, tree.step))
        key = self._key_of(tree)
        if key is None:
            raise _UnknownError
        return key


def _is_of_buffer(key: Any) -> bool:
    return isinstance(key, WeakIdRef) or (isinstance(key, tuple) and any(map(_is_of_buffer, key)))


def _is_causal(mask: torch.Tensor, keep: bool, never: float) -> torch.Tensor:
    """A bool, where the mask is."""
    size = mask.shape[-1]
    causal = torch.ones(size, size, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype == torch.bool:
        return (mask.eq(keep) == causal).all()
    return ((mask == 0) == causal).all() & ((mask <= never) != causal).all()
