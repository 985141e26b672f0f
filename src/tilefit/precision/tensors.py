"""What trackers ask of tensors and operations."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.optim import Optimizer

from tilefit.emulation.tensor import CudaTensor

HALF = (torch.float16, torch.bfloat16)
#: Values followed of each tensor.
VALUES = 1024
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_T = TypeVar("_T")


class Notes(dict[int, tuple["weakref.ref[Tensor]", _T]]):
    """What is noted of tensors, each of which is known by being itself."""

    def note(self, tensor: Tensor, what: _T) -> _T:
        """Note something of a tensor."""
        self[id(tensor)] = weakref.ref(tensor), what
        return what

    def of(self, tensor: Tensor) -> _T | None:
        """What was noted of a tensor; None for nothing."""
        known = self.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def first(self, tensors: Iterable[Tensor]) -> _T | None:
        """What was noted of the first of some tensors of which anything was."""
        return next((what for tensor in tensors if (what := self.of(tensor)) is not None), None)


@cache
def name_of(dtype: torch.dtype) -> str:
    """``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among values and in lists of them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has dense values, and is of no subclass that stands for more."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor._is_zerotensor()
        and not stands_for_another(tensor)
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is plain, or one of the emulated GPU's, which has memory but no values."""
    return isinstance(tensor, CudaTensor) or is_plain(tensor)


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor is a plain one of floating-point numbers, some of them."""
    return tensor.is_floating_point() and is_plain(tensor) and bool(tensor.numel())


def holds_zeros(tensor: Tensor) -> bool:
    """Whether a tensor is known to hold nothing but zeros; waits for the device."""
    if isinstance(tensor, CudaTensor):
        known = tensor.known()
        return not tensor.content if known is None else not bool(known.any())
    return has_values(tensor) and not bool(tensor.detach().any())


def stands_for_another(tensor: Tensor) -> bool:
    """Whether a tensor is one that ``torch.func`` works with, of which nothing can be read."""
    return bool(is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor))


def sampled(tensor: Tensor, most: int) -> Tensor:
    """About ``most`` elements, evenly spread over memory; a view, except of unusual layouts."""
    number = tensor.numel()
    step = max(1, number // most)
    dense = tensor.is_contiguous() or (
        tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    # One operation, of which there is one for every gradient.
    return tensor.as_strided((-(-number // step),), (step,)) if dense else tensor.reshape(-1)[::step]


def spread(tensor: Tensor) -> Tensor:
    """Up to about :data:`VALUES` elements, in the order of the indices; a copy."""
    # A gradient may lie in memory in another order than its parameter.
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // VALUES)].clone()
