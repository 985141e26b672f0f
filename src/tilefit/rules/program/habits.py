"""Habits of a program, as its rules see them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tilefit.ops import Habit, Step
from tilefit.rules.base import Change
from tilefit.rules.exchanges import without_ops


def habits(step: Step, name: str) -> list[list[Habit]]:
    """Those of one name, by line."""
    lines: dict[str, list[Habit]] = {}
    for habit in step.program.habits:
        if habit.name == name:
            lines.setdefault(habit.site.source, []).append(habit)
    return list(lines.values())


def made(same: Iterable[Habit]) -> list[int]:
    """The operations that they made, as indices."""
    return sorted({index for habit in same for index in range(habit.first, habit.last)})


def without(step: Step, same: Iterable[Habit], event: str = "") -> Change:
    """The step without some habits, the operations that they made, and events of a name."""
    same = tuple(same)
    program = replace(
        step.program,
        events=tuple(each for each in step.program.events if not event or each.name != event),
        habits=tuple(each for each in step.program.habits if each not in same),
    )
    return Change(step=without_ops(step, set(made(same)), program))
