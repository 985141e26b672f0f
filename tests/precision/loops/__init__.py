"""Training loops, wrong and right, that know nothing of the debugger.

A wrong loop is marked with its class of the catalogue and the code it must be found by; the line that is
wrong ends in ``# here``. A right loop is its healthy twin, or a healthy loop that a naive rule would accuse.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Loop = Callable[[], Any]


@dataclass(frozen=True)
class Wrong:
    """A wrong loop: class of the catalogue, the code it is found by, and its line, if it has one."""

    number: int
    code: str
    run: Loop

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def lines(self) -> set[int]:
        source, first = inspect.getsourcelines(self.run)
        return {first + offset for offset, line in enumerate(source) if line.rstrip().endswith("# here")}


@dataclass(frozen=True)
class Right:
    """A healthy loop; ``number`` is the class it is the twin of."""

    number: int
    run: Loop

    @property
    def name(self) -> str:
        return self.run.__name__


WRONG: list[Wrong] = []
RIGHT: list[Right] = []


def wrong(number: int, code: str = "") -> Callable[[Loop], Loop]:
    """Mark a wrong loop; its code has the class's number unless it is given."""

    def mark(run: Loop) -> Loop:
        WRONG.append(Wrong(number, code or f"AMP{number:03}", run))
        return run

    return mark


def right(number: int) -> Callable[[Loop], Loop]:
    """Mark a healthy loop."""

    def mark(run: Loop) -> Loop:
        RIGHT.append(Right(number, run))
        return run

    return mark
