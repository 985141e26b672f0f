"""A value of a tensor on the GPU that is known, or can be made up."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: How memory is lost that nobody has written to: until somebody writes what is known.
UNWRITTEN = "unwritten"


class State:
    """What all views of one memory share."""

    __slots__ = ("assumed", "lost")

    def __init__(self, assumed: bool = False, lost: bool | str = False) -> None:
        self.assumed = assumed
        self.lost = lost  # something unknown was written to it, or nothing yet


class Value:
    """A known value: there, or to be made when it is asked for.

    Attributes:
        state: Shared with the values of other views of the same memory.
        depth: How many others must be made one after the other before it.
    """

    __slots__ = ("_make", "_tensor", "depth", "state")

    def __init__(
        self,
        tensor: torch.Tensor | None,
        state: State | None = None,
        make: Callable[[], torch.Tensor | None] | None = None,
        depth: int = 0,
    ) -> None:
        self._tensor, self._make, self.depth = tensor, make, depth
        self.state = state or State(assumed=make is not None)

    @property
    def unwritten(self) -> torch.Tensor | None:
        """Memory of the CPU's for what will be written; None where something was, whether known or not."""
        return self._tensor if self.state.lost is UNWRITTEN else None

    @property
    def is_there(self) -> bool:
        """It need not be made."""
        return self._tensor is not None and not self.state.lost

    def tensor(self) -> torch.Tensor | None:
        """The value on the CPU; None where it is lost, or cannot be made."""
        if self._make is not None:
            self._tensor, self._make, self.depth = self._make(), None, 0
        return None if self.state.lost else self._tensor
