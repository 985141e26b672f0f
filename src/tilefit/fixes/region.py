"""What the parts of a module may hand each other while a call of it runs, and what nobody else may see."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilefit.fixes.behaviour import Behaviour


class _Here(threading.local):
    """The spaces of the calls that this thread is in, by the region."""

    def __init__(self) -> None:
        self.spaces: dict[int, dict[Any, Any]] = {}


_here = _Here()


@dataclass(frozen=True, eq=False)
class Region(Behaviour):
    """The module's call opens a space, in which behaviours of its parts find each other.

    The space is gone when the call returns or raises; every call and every thread has its own. Parts that are
    called by anybody else find none.
    """

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        spaces = _here.spaces
        outer = spaces.get(id(self))
        spaces[id(self)] = {}
        try:
            return forward(*args, **kwargs)
        finally:
            if outer is None:
                del spaces[id(self)]
            else:
                spaces[id(self)] = outer

    def space(self) -> dict[Any, Any] | None:
        """That of the innermost call of the module in this thread; None outside, and in compiled code."""
        return None if torch.compiler.is_compiling() else _here.spaces.get(id(self))
