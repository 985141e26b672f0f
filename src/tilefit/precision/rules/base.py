"""What a rule of the mixed-precision debugger is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, TypeVar, get_args

from tilefit.precision.events import Event
from tilefit.rules.finding import ERROR, WARNING, Alarm

#: Largest finite value, and the smallest normal one, of the half-precision types.
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38}
#: Bits of their significand, with the implicit one: integers are exact up to 2 to this power.
SIGNIFICAND_BITS = {"float16": 11, "bfloat16": 8}

E = TypeVar("E", bound=Event)


class PrecisionRule(ABC, Generic[E]):
    """A rule judges events of one type, or of several: ``PrecisionRule[Clipped | Written]``.

    A subclass's docstring is its page: what it sees, why nobody notices, the wrong loop, the right loop, the
    source. ``code`` is ``AMP`` and a number; ``title`` one line; ``severity`` and ``fix`` are an alarm's,
    unless its check says otherwise; ``by_module`` says that modules that share a line are told apart.
    ``needs`` are the facts of a run without all of which there is nothing to check, as the report says it;
    ``closely`` says that it takes close looks, ``values`` that it takes numbers, which the emulated GPU has
    none of; ``replay`` names the function that checks it, where that is
    not done while training; ``limit`` is what it never sees.
    """

    code: ClassVar[str]
    title: ClassVar[str]
    severity: ClassVar[str] = WARNING
    fix: ClassVar[str] = ""
    sees: ClassVar[tuple[type[Event], ...]]
    by_module: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ()
    closely: ClassVar[bool] = False
    values: ClassVar[bool] = False
    replay: ClassVar[str] = ""
    limit: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        ((events,),) = (get_args(base) for base in vars(cls)["__orig_bases__"])
        cls.sees = get_args(events) or (events,)

    @abstractmethod
    def check(self, event: E) -> Alarm | None:
        """What is wrong, if anything is."""

    def judge(self, event: Any) -> Iterator[Alarm]:
        """The alarm that an event of any type gives rise to."""
        if isinstance(event, self.sees) and (alarm := self.check(event)) is not None:  # type: ignore[arg-type]
            yield alarm

    def alarm(self, event: Event, message: str, *arithmetic: str, severity: str = "", fix: str = "") -> Alarm:
        """An alarm at the event's place, of the rule's own severity and with its advice where nothing else is
        said: an error only if all that it follows from was seen."""
        severity = severity or self.severity
        return Alarm(
            code=self.code,
            severity=WARNING if severity == ERROR and not event.seen else severity,
            source=event.source,
            module=event.module,
            message=message,
            fix=fix or self.fix,
            arithmetic=arithmetic,
        )


def figure(value: float) -> str:
    """A number of any size, short: ``65536``, ``0.125``, ``1.5e-05``."""
    return f"{value:g}" if value == 0 or 1e-3 <= abs(value) < 1e7 else f"{value:.2g}"


def inverse(scale: float) -> str:
    """``1/65536 = 1.5e-05``."""
    return f"1/{figure(scale)} = {figure(1 / scale)}"


def ends(dtype: str) -> str:
    """``float16 ends at 65504``."""
    return f"{dtype} ends at {figure(LARGEST[dtype])}"
