"""Evaluations that nobody looks at: what a model made of such inputs so often already is not made again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from tilefit.emulation.tensor import META, CudaTensor

#: Calls after which a result has the layout that it had before. A choice: what a model does only the first
#: times, such as to fill a cache, is done by then.
_SEEN = 6
_PLAIN = int | float | str | bool | torch.dtype | torch.device | None


class Repeats:
    """Results of a model in evaluation mode, without gradients, of which nothing but the layout is known.

    Programs evaluate on hundreds of batches before they train. On shapes all of them come to the same.

    Args:
        took: Told of memory that a result takes.
    """

    def __init__(self, took: Callable[[torch.Tensor], None]) -> None:
        self._took = took
        self._seen: Counter[Any] = Counter()
        self._results: dict[Any, Any] = {}

    def result(self, call: Callable[..., Any], module: nn.Module, place: Any, args: Any, kwargs: Any) -> Any:
        """What ``call`` returns of a module and its arguments, from this place.

        Where it was called as often as that, the results are new tensors of the layout that they had.
        """
        key = None if module.training or torch.is_grad_enabled() else _key(module, place, args, kwargs)
        if key is None:
            return call(module, *args, **kwargs)
        if key in self._results:
            return tree_map(self._anew, self._results[key])
        out = call(module, *args, **kwargs)
        self._seen[key] += 1
        if self._seen[key] >= _SEEN and _is_unknown(out, (args, kwargs, [*module.parameters()])):
            self._results[key] = tree_map(_layout, out)
        return out

    def _anew(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=META)
        self._took(made)
        return CudaTensor(made)


def _layout(leaf: Any) -> Any:
    if not isinstance(leaf, CudaTensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=META)


def _key(module: nn.Module, place: Any, args: Any, kwargs: Any) -> Any:
    """A call by the layouts of its tensors and its other values; None if there are values of other kinds."""
    leaves, tree = tree_flatten((args, kwargs))
    parts: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, CudaTensor) and leaf.entries is None:
            parts.append((leaf.shape, leaf.stride(), leaf.dtype))
        elif isinstance(leaf, _PLAIN):
            parts.append((type(leaf), leaf))
        else:
            return None
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    return id(module), place, autocast, str(tree), tuple(parts)


def _is_unknown(out: Any, given: Any) -> bool:
    """Whether results are numbers that nobody knows, in memory other than what was given."""
    others = {_memory(leaf) for leaf in tree_leaves(given) if isinstance(leaf, CudaTensor)}
    leaves = tree_leaves(out)
    made = [leaf for leaf in leaves if isinstance(leaf, CudaTensor)]
    return (
        bool(made)
        and all(isinstance(leaf, CudaTensor | _PLAIN) for leaf in leaves)
        and all(
            leaf.dtype.is_floating_point and leaf.entries is None and leaf.known() is None for leaf in made
        )
        and others.isdisjoint(map(_memory, made))
    )


def _memory(tensor: CudaTensor) -> int:
    return int(tensor.on_meta.untyped_storage()._cdata)
