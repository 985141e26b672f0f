"""What a rule of the mixed-precision debugger is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from tilefit.precision.events import Event
from tilefit.rules.finding import Alarm

#: Largest finite value, and the smallest normal one, of the half-precision types.
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38}
#: Bits of their significand, with the implicit one: integers are exact up to 2 to this power.
SIGNIFICAND_BITS = {"float16": 11, "bfloat16": 8}


class PrecisionRule(ABC):
    """A rule judges one kind of event.

    A subclass's docstring is its page: what it sees, why nobody notices, the wrong loop, the right loop, the
    source. ``code`` is ``AMP`` and a number; ``title`` one line; ``sees`` the class of its events;
    ``by_module`` says that modules that share a line are told apart.
    """

    code: ClassVar[str]
    title: ClassVar[str]
    sees: ClassVar[type[Event]]
    by_module: ClassVar[bool] = False

    @abstractmethod
    def check(self, event: Event) -> Iterator[Alarm]:
        """Yield what is wrong."""

    def alarm(
        self, event: Event, severity: str, message: str, fix: str, *arithmetic: str, module: str | None = None
    ) -> Alarm:
        """An alarm at the event's place."""
        return Alarm(
            code=self.code,
            severity=severity,
            source=event.source,
            module=event.module if module is None else module,
            message=message,
            fix=fix,
            arithmetic=arithmetic,
        )


def figure(value: float) -> str:
    """A number of any size, short: ``65536``, ``0.125``, ``1.5e-05``."""
    return f"{value:g}" if value == 0 or 1e-3 <= abs(value) < 1e7 else f"{value:.2g}"
