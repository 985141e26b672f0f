"""What all trackers share: the step that is running, and where their events go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from tilefit.precision.events import Event
from tilefit.precision.rules import PrecisionRule
from tilefit.rules.finding import ERROR, NOTE, WARNING, Alarm

_log = logging.getLogger("tilefit.precision")
#: What makes alarms one: code, line, module where it matters, and what to do.
_Place = tuple[str, str, str, str]
_ORDER = (NOTE, WARNING, ERROR)


class Recorder:
    """Judges events by the rules and keeps what they find.

    Args:
        rules: The rules that judge.

    Attributes:
        step: The step that is running, counted from 0.
        looking: Whether this step is looked at closely: only then may a tracker wait for the device.
        look_soon: A tracker wants a close look at the next step.
        names: Names of parameters by ``id``.
    """

    def __init__(self, rules: Iterable[PrecisionRule]) -> None:
        self._rules = tuple(rules)
        self._alarms: dict[_Place, Alarm] = {}
        self._unchecked: dict[str, None] = {}
        self._known: dict[object, list[_Place]] = {}
        self.step = 0
        self.looking = True
        self.look_soon = False
        self.names: dict[int, str] = {}

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """The alarms so far: the most severe first, then the earliest."""
        return tuple(
            sorted(
                self._alarms.values(),
                key=lambda a: (-_ORDER.index(a.severity), a.first_step, a.code, a.source),
            )
        )

    @property
    def unchecked(self) -> tuple[str, ...]:
        """What could not be looked at."""
        return tuple(self._unchecked)

    def cannot_check(self, what: str) -> None:
        """Say once what could not be looked at, and why."""
        self._unchecked[what] = None

    def emit(self, event: Event) -> None:
        """Judge an event."""
        self._judge(event)

    def emit_once(self, key: object, make: Callable[[], Event]) -> None:
        """Judge the event ``make()`` the first time; afterwards only count.

        Making an event may wait for the device, to read a scale. A mistake that is repeated in each step must
        not do that again and again.
        """
        if key not in self._known:
            self._known[key] = self._judge(make())
            return
        for place in self._known[key]:
            alarm = self._alarms[place]
            self._alarms[place] = replace(alarm, steps=alarm.steps + 1)

    def _judge(self, event: Event) -> list[_Place]:
        places = []
        for rule in self._rules:
            if not isinstance(event, rule.sees):
                continue
            for alarm in rule.check(event):
                module = alarm.module if rule.by_module or not alarm.source else ""
                place = (alarm.code, alarm.source, module, alarm.fix)
                places.append(place)
                before = self._alarms.get(place)
                if before is None:
                    self._alarms[place] = replace(alarm, first_step=self.step)
                    _log.log(
                        logging.INFO if alarm.severity == NOTE else logging.WARNING,
                        "step %d: %s %s: %s (%s)",
                        self.step,
                        alarm.source,
                        alarm.code,
                        alarm.message,
                        alarm.severity,
                    )
                    continue
                worse = alarm if _ORDER.index(alarm.severity) >= _ORDER.index(before.severity) else before
                self._alarms[place] = replace(worse, first_step=before.first_step, steps=before.steps + 1)
        return places
