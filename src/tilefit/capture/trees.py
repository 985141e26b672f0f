"""The tensors among what a model takes and returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors within lists, tuples and mappings, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors(value)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor that is spread over several; all of any other."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def untransformed(value: Any) -> Any:
    """What a transform of torch.func shows as one sample, or as a value to be differentiated: the tensor."""
    while isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value
