"""What the parts of a module may hand each other while a call of it runs, and what nobody else may see."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilefit.fixes.changes.behaviour import Behaviour, require_changeable
from tilefit.fixes.changes.calls import is_transformed


class _Here(threading.local):
    """By the region, of the calls that this thread is in: the space, and what hooked saved tensors then."""

    def __init__(self) -> None:
        self.spaces: dict[int, tuple[dict[Any, Any], Any]] = {}


_here = _Here()


def packing() -> Any:
    """What packs the tensors that autograd saves now (activation checkpointing), if anything does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@dataclass(frozen=True, eq=False)
class Region(Behaviour):
    """The module's call opens a space, in which behaviours of its parts find each other.

    The space is gone when the call returns or raises; every call and every thread has its own. Parts that are
    called by anybody else find none. Nor do those that are checkpointed within the call: what is computed
    anew in the backward pass is computed outside of it, and has to save the same tensors.
    """

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        spaces = _here.spaces
        outer = spaces.get(id(self))
        spaces[id(self)] = {}, packing()
        try:
            return forward(*args, **kwargs)
        finally:
            del spaces[id(self)]
            if outer is not None:
                spaces[id(self)] = outer

    def require(self, module: nn.Module, path: str) -> None:
        require_changeable(module, path)

    def space(self) -> dict[Any, Any] | None:
        """That of the innermost call of the module in this thread.

        None outside, in what is compiled, traced, batched, or differentiated by ``torch.func`` or forward.
        """
        # The compiler is told first: it need not look at what is a thread's own.
        if torch.compiler.is_compiling() or (found := _here.spaces.get(id(self))) is None or is_transformed():
            return None
        space, hooks = found
        return space if hooks == packing() else None
