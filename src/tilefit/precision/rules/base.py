"""What a rule of the mixed-precision debugger is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, dataclass_transform

from tilefit.rules.finding import ERROR, WARNING, Alarm

#: Largest finite value, and the smallest normal one, of the half-precision types.
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38}
#: Bits of their significand, with the implicit one: integers are exact up to 2 to this power.
SIGNIFICAND_BITS = {"float16": 11, "bfloat16": 8}


@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False)
@dataclass(frozen=True, eq=False)
class PrecisionRule(ABC):
    """A rule is a class, and its objects are what has happened in a run and may break it: plain data, without
    torch. Scales are numbers, element types are written as in ``torch.float16`` without the ``torch.``.

    A subclass's docstring is its page: what it sees, why nobody notices, the wrong loop, the right loop, the
    source. ``title`` is one line; ``fix`` an alarm's advice, unless it says otherwise.

    Attributes:
        source: The line of the user's code, ``file:line``.
        module: The module, parameter or optimizer it happened to, if known.
        seen: Everything it was concluded from was seen; else a part is inferred.
    """

    source: str = ""
    module: str = ""
    seen: bool = field(default=True, kw_only=True)

    code: ClassVar[str]
    title: ClassVar[str]
    fix: ClassVar[str] = ""
    #: What it never sees.
    limit: ClassVar[str] = ""
    severity: ClassVar[str] = WARNING
    needs: ClassVar[tuple[str, ...]] = ()
    by_module: ClassVar[bool] = False
    closely: ClassVar[bool] = False
    values: ClassVar[bool] = False
    replay: ClassVar[str] = ""

    def __init_subclass__(cls, *, code: str = "", **facts: Any) -> None:
        """Make a rule.

        Args:
            code: ``AMP`` and a number.
            facts: ``severity``: an alarm's, unless it says otherwise. ``needs``: the facts of a run without
                all of which there is nothing to check, as the report says it. ``by_module``: modules that
                share a line are told apart. ``closely``: it takes close looks. ``values``: it takes numbers,
                which the emulated GPU has none of. ``replay``: the function that checks it, where that is
                not done while training.
        """
        super().__init_subclass__()
        for name, value in {"code": code, **facts}.items():
            setattr(cls, name, value)
        dataclass(frozen=True, kw_only=True, eq=False)(cls)

    @abstractmethod
    def judge(self) -> Alarm | None:
        """What is wrong, if anything is."""

    def alarm(self, message: str, *arithmetic: str, severity: str = "", fix: str = "") -> Alarm:
        """An alarm, of the rule's own severity and with its advice where nothing else is said: an error only
        if all that it follows from was seen."""
        severity = severity or self.severity
        severity = WARNING if severity == ERROR and not self.seen else severity
        what: dict[str, Any] = {"code": self.code, "source": self.source, "module": self.module}
        return Alarm(severity=severity, message=message, fix=fix or self.fix, arithmetic=arithmetic, **what)


def figure(value: float) -> str:
    """A number of any size, short: ``65536``, ``0.125``, ``1.5e-05``; a whole one exactly, as scales are."""
    if abs(value) < 1e9 and value == int(value):
        return str(int(value))
    return f"{value:g}" if value == 0 or 1e-3 <= abs(value) < 1e7 else f"{value:.2g}"


def inverse(scale: float) -> str:
    """``1/65536 = 1.5e-05``."""
    return f"1/{figure(scale)} = {figure(1 / scale)}"


def ends(dtype: str) -> str:
    """``float16 ends at 65504``."""
    return f"{dtype} ends at {figure(LARGEST[dtype])}"
