"""The bus that trackers and rules are on, and what the rules have found."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from tilefit.precision.rules import PrecisionRule, all_rules
from tilefit.report.watched import Watched
from tilefit.rules.finding import ERROR, NOTE, WARNING, Alarm
from tilefit.rules.registry import pages
from tilefit.version import __version__

_log = logging.getLogger("tilefit.precision")
#: What makes alarms one: code, line, module where it matters, and what to do.
_Place = tuple[str, str, str, str]
_ORDER = (NOTE, WARNING, ERROR)
#: So many steps are looked at closely for the sake of a suspicion that none of them confirms.
_LOOKS = 4

_E = TypeVar("_E")


class Recorder:
    """Passes events on to those that asked for their type, the rules among them, and keeps the alarms.

    Args:
        rules: The rules that judge.

    Attributes:
        step: The step that is running, counted from 0.
        looking: Whether this step is looked at closely: only then may a tracker wait for the device.
        look_soon: A tracker wants a close look at the next step.
        names: Names of modules and parameters by ``id``.
        scale, first_scale: The loss scale in the last step that was looked at closely, and in the first; None
            without one.
        facts: What the run has: what a rule needs before there is anything to check.
        unchecked: What could not be looked at, and the rules that needed it.
    """

    def __init__(self, rules: Iterable[PrecisionRule]) -> None:
        self.rules = {rule.code: rule for rule in rules}
        self._subscribers: defaultdict[type, list[Callable[[Any], object]]] = defaultdict(list)
        self._alarms: dict[_Place, Alarm] = {}
        self.unchecked: dict[str, tuple[str, ...]] = {}
        self._known: dict[object, _Place | None] = {}
        self._suspicions = 0
        self._process = os.getpid()
        self.step = 0
        self.looking = True
        self.look_soon = False
        self.scale: float | None = None
        self.first_scale: float | None = None
        self.names: dict[int, str] = {}
        self.facts: set[str] = set()

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """The alarms so far: the most severe first, then the earliest."""
        alarms = self._alarms.values()
        return tuple(
            sorted(alarms, key=lambda a: (-_ORDER.index(a.severity), a.first_step, a.code, a.source))
        )

    def report(self, title: str, **more: Any) -> Watched:
        """The report of what was found so far."""
        found, rules = self.alarms, pages((alarm.code for alarm in self.alarms), all_rules())
        return Watched(title=title, findings=found, version=__version__, rules=rules, **more)

    def cannot_check(self, what: str, *codes: str) -> None:
        """Say once what could not be looked at, and why; and which rules needed it."""
        self.unchecked[what] = codes

    def on(self, kind: type[_E], listener: Callable[[_E], object]) -> None:
        """Have a listener called with every event of a type."""
        self._subscribers[kind].append(listener)

    def tell(self, event: object) -> None:
        """Pass an event of the run on to the trackers that asked for it."""
        for listener in self._subscribers[type(event)]:
            listener(event)

    def name(self, model: nn.Module) -> None:
        """Learn the names of a model's modules and parameters, where they have none yet."""
        for name, inner in (*model.named_modules(), *model.named_parameters()):
            self.names.setdefault(id(inner), name or type(model).__name__)

    def suspect(self) -> None:
        """Something looks wrong that only a close look can confirm."""
        self._suspicions += 1
        self.look_soon |= self._suspicions <= _LOOKS

    def knows(self, key: object) -> bool:
        """Whether a mistake was judged before."""
        return key in self._known

    def once(self, key: object, make: Callable[[], PrecisionRule], *, again: bool = False) -> None:
        """Judge what ``make()`` makes the first time; afterwards only count, unless it may have become worse.

        Making an event may wait for the device, to read a scale. A mistake that is repeated in each step must
        not do that again and again.
        """
        if again or key not in self._known:
            self._known[key] = self.emit(make())
        elif (place := self._known[key]) is not None:
            alarm = self._alarms[place]
            self._alarms[place] = replace(alarm, steps=alarm.steps + 1)

    def emit(self, event: PrecisionRule) -> _Place | None:
        """Judge something that happened; where its alarm is kept, if it gives one."""
        alarm = event.judge() if event.code in self.rules else None
        if alarm is None:
            return None
        place = alarm.code, alarm.source, alarm.module * (event.by_module or not alarm.source), alarm.fix
        before = self._alarms.get(place)
        if before is None:
            self._alarms[place] = replace(alarm, first_step=self.step)
            self._say(alarm)
        else:
            worse = alarm if _ORDER.index(alarm.severity) >= _ORDER.index(before.severity) else before
            self._alarms[place] = replace(worse, first_step=before.first_step, steps=before.steps + 1)
        return place

    def _say(self, alarm: Alarm) -> None:
        if os.getpid() != self._process:
            return  # a child: its steps are in nobody's report
        level = logging.INFO if alarm.severity == NOTE else logging.WARNING
        words = (self.step, alarm.source, alarm.code, alarm.message, alarm.severity)
        _log.log(level, "step %d: %s %s: %s (%s)", *words)
