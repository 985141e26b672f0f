"""Where the modules and optimizers of a program were made: which lines called the constructor."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tilefit.capture.packages import is_installed
from tilefit.capture.sites import call_end
from tilefit.fixes.source.values import Place, written_in


@dataclass(frozen=True, slots=True)
class Caller:
    """A call that was going on.

    Attributes:
        code: The function it was made in.
        instruction: Index of the call's instruction there.
        line: Its line.
        of_constructor: The function is a constructor of the very object whose birth this is.
    """

    code: CodeType
    instruction: int
    line: int
    of_constructor: bool = False

    @property
    def path(self) -> str:
        return self.code.co_filename

    @property
    def is_users(self) -> bool:
        """The call is written in the user's code, not in a library's."""
        return not is_installed(self.path)

    @property
    def end(self) -> tuple[int, int] | None:
        """Where the call ends, as :func:`~tilefit.capture.sites.call_end` says."""
        return call_end(self.code, self.instruction)


#: Who called whom, innermost first, up to the one that loads and runs the program.
Callers = tuple[Caller, ...]

#: What calls the user's code: what is outside them is the command line.
_LOADERS = ("tilefit.capture.targets", "tilefit.fixes.source.program")


def callers(frame: FrameType | None, born: Any = None) -> Callers:
    """The calls that are going on in the program, from a frame outwards."""
    found = []
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith(_LOADERS):
        code = frame.f_code
        found.append(Caller(code, frame.f_lasti, frame.f_lineno, _constructs(frame, born)))
        frame = frame.f_back
    return tuple(found)


def _constructs(frame: FrameType, born: Any) -> bool:
    """Whether a constructor of an object is what runs."""
    if born is None or frame.f_code.co_name != "__init__":
        return False
    return frame.f_locals.get(next(iter(frame.f_code.co_varnames), "")) is born


class Births:
    """Where objects were made."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Any, Callers]] = {}
        self._places: dict[int, list[tuple[int, Place]]] = defaultdict(list)

    def add(self, born: Any, frame: FrameType) -> None:
        """Note who is making an object; the first constructor to say so counts."""
        if id(born) not in self._by_id:
            self._by_id[id(born)] = born, callers(frame, born)
            inner: FrameType | None = frame
            while inner is not None and _constructs(inner, born):
                for each in written_in(dict(inner.f_locals)):
                    self._places[id(born)].append((int(each), each.place))
                inner = inner.f_back

    def of(self, born: Any) -> Callers:
        """Who made an object; empty where that was not seen (a copy, a pickle)."""
        return self._by_id.get(id(born), (None, ()))[1]

    def places(self, born: Any, size: int) -> set[Place]:
        """Where a number is written that an object's constructors were given."""
        return {place for value, place in self._places.get(id(born), ()) if value == size}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that were made."""
        return [born for born, _ in self._by_id.values() if isinstance(born, torch.optim.Optimizer)]


@contextmanager
def recorded(births: Births) -> Iterator[None]:
    """Within the block, the births of modules and optimizers are noted."""

    def watched(cls: type) -> Any:
        original = cls.__init__  # type: ignore[misc]

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            births.add(self, sys._getframe(1))
            original(self, *args, **kwargs)

        return patch.object(cls, "__init__", __init__)

    with watched(nn.Module), watched(torch.optim.Optimizer):
        yield
