"""Tensors that are the same in every call: made of numbers alone, or of buffers that nobody writes to.

Such a tensor is known by its *key*: the function that made it, and the keys of its arguments. What was found
out about one tensor, at the price of waiting for the GPU, holds for every other with its key.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdRef

from tilefit.fixes.changes.calls import is_on_gpu

_MAKERS = frozenset("ones zeros full arange eye linspace tensor scalar_tensor".split())
#: Of their first argument only shape and element type matter.
_LIKE = frozenset("ones_like zeros_like full_like new_ones new_zeros new_full".split())
_RANDOM = frozenset(
    """rand_like randn_like randint_like bernoulli dropout multinomial normal empty_like new_empty
    native_dropout""".split()
)
_NUMBERS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
#: A buffer that was written to more often than this is not there to stay.
_MOST_WRITES = 100
_MOST_VERDICTS = 4096
_verdicts: dict[Any, bool] = {}
_CHANGED = "a causal mask was changed by .data; take the fix fuse-attention back (plan.undo())"


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
            if type(buffer) is torch.Tensor and not buffer.is_inference() and buffer._version <= _MOST_WRITES:
                self._know(buffer, (WeakIdRef(buffer), buffer._version))

    def observe(self, func: Any, name: str, args: Any, kwargs: Any, result: Any, in_place: bool) -> None:
        """Note a call of PyTorch; ``in_place``: it wrote into its first argument."""
        if name not in _MAKERS and name not in _LIKE:
            for arg in args:
                if id(arg) in self._keys:
                    break
            else:
                return
        if not isinstance(result, torch.Tensor):
            return
        key: Any
        try:
            if name in _LIKE:
                key = (name, tuple(result.shape), result.dtype, self._key((args[1:], kwargs)))
            else:
                key = (func, self._key((args, kwargs)))
        except _UnknownError:
            key = None
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
        if mask.is_meta:
            return True
        if not is_on_gpu(mask):
            return bool(_is_causal(mask, keep, never))
        verdict = _verdicts.get((key, keep))
        if verdict is None:
            if torch.cuda.is_current_stream_capturing():
                return False  # no value can be read now
            if len(_verdicts) >= _MOST_VERDICTS:
                _verdicts.clear()
            verdict = _verdicts[key, keep] = bool(_is_causal(mask, keep, never))
        elif verdict and _is_of_buffer(key):
            torch._assert_async(_is_causal(mask, keep, never), _CHANGED)
        return verdict

    def number(self, tensor: torch.Tensor) -> float | None:
        """The value of a tensor of one element, where that is known without waiting for a GPU."""
        if tensor.numel() != 1:
            return None
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and not tensor.requires_grad:
            return float(tensor)
        key = self._key_of(tensor)
        if key is None or getattr(key[0], "__name__", "") != "full":
            return None
        positional, named = key[1]
        _, fill = positional[1] if len(positional) > 1 else dict(named)["fill_value"]
        return float(fill)

    def _know(self, tensor: torch.Tensor, key: Any) -> None:
        self._keys[id(tensor)] = (weakref.ref(tensor), key)

    def _key_of(self, tensor: torch.Tensor) -> Any:
        ref, key = self._keys.get(id(tensor), (None, None))
        return key if ref is not None and ref() is tensor else None

    def _key(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            key = self._key_of(tree)
            if key is None:
                raise _UnknownError
            return key
        if tree is None or tree is Ellipsis or isinstance(tree, _NUMBERS):
            return type(tree), tree  # 1, 1.0 and True are equal, but make different tensors
        if isinstance(tree, (list, tuple)):
            return tuple(map(self._key, tree))
        if isinstance(tree, dict):
            return tuple((name, self._key(value)) for name, value in sorted(tree.items()))
        if isinstance(tree, slice):
            return self._key((tree.start, tree.stop, tree.step))
        raise _UnknownError


def _is_of_buffer(key: Any) -> bool:
    return isinstance(key, WeakIdRef) or (isinstance(key, tuple) and any(map(_is_of_buffer, key)))


def _is_causal(mask: torch.Tensor, keep: bool, never: float) -> torch.Tensor:
    """A bool, where the mask is."""
    size = mask.shape[-1]
    causal = torch.ones(size, size, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype == torch.bool:
        return (mask.eq(keep) == causal).all()
    return ((mask == 0) == causal).all() & ((mask <= never) != causal).all()
