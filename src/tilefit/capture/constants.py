"""Values that do not depend on the inputs: masks of ones, positions, and what is computed from them.

On ``meta`` no tensor has a value, yet much code asks for one that is the same on every run (is this mask of
ones all ones?). How such a tensor came about is remembered, and computed for real only if it is asked for.
"""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from tilefit.ops.operations import NAMED

_MAKERS, _RANDOM = NAMED["values"]["constant"], NAMED["values"]["random"]
_MAX_ELEMENTS = 1 << 24
#: Names of calls that write into their first argument: ``add_``, ``__iadd__``, ``__setitem__``.
_IN_PLACE = re.compile(
    r"[a-z]\w*[a-z0-9]_|__setitem__|__i(add|sub|mul|div|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__"
)


@dataclass(frozen=True, eq=False, slots=True)
class _Recipe:
    """How a constant was made; tensors among the arguments are recipes themselves."""

    func: Any
    args: Any
    kwargs: Any


class Constants:
    """Remembers the recipes of tensors that depend on no input."""

    def __init__(self) -> None:
        self._recipes: dict[int, _Recipe] = {}

    def observe(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note a call that was made."""
        if _IN_PLACE.fullmatch(name):
            if args and id(args[0]) in self._recipes:
                self._recipes.clear()  # other views of the same memory have changed with it
            return
        if not isinstance(result, torch.Tensor) or name in _RANDOM or result.numel() > _MAX_ELEMENTS:
            return
        if name in _MAKERS and args and (name.endswith("_like") or name.startswith("new_")):
            # Only the shape and the type of the first argument matter.
            like, *rest = args
            args = _Recipe(torch.empty, (like.shape,), {"dtype": like.dtype}), *rest
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        if not (tensors or name in _MAKERS) or not all(id(t) in self._recipes for t in tensors):
            return
        stored = tree_map(
            lambda leaf: self._recipes[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
        )
        self._keep(result, _Recipe(func, *stored))

    def _keep(self, tensor: torch.Tensor, recipe: _Recipe) -> None:
        self._recipes[id(tensor)] = recipe
        weakref.finalize(tensor, self._recipes.pop, id(tensor), None).atexit = False

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor's value on the CPU, or None if it depends on an input."""
        recipe = self._recipes.get(id(tensor))
        return None if recipe is None else _computed(recipe, {})


def _computed(recipe: _Recipe, done: dict[_Recipe, torch.Tensor]) -> torch.Tensor:
    if recipe not in done:
        args, kwargs = tree_map(
            lambda leaf: _computed(leaf, done) if isinstance(leaf, _Recipe) else _on_cpu(leaf),
            (recipe.args, recipe.kwargs),
        )
        done[recipe] = recipe.func(*args, **kwargs)
    return done[recipe]


def _on_cpu(leaf: Any) -> Any:
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
