"""What each rule could look at in a run, and what not and why."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.recorder import Recorder
from tilefit.report.watched import CANNOT, CHECKED, INAPPLICABLE, Check

#: What stands in the way of close looks, for the report.
NUMERICS_OFF = "close looks are switched off"
TOO_SHORT = "no step was looked at closely: the run was too short"


def checks(recorder: Recorder, looks: int, numerics: bool) -> Iterator[Check]:
    """One for each rule.

    Args:
        recorder: Knows the rules, the facts of the run, and what could not be looked at.
        looks: Steps looked at closely.
        numerics: Close looks were asked for.
    """
    for rule in recorder.rules:
        missing = [need for need in rule.needs if need not in recorder.facts]
        blocked = [what for what, codes in recorder.unchecked.items() if rule.code.startswith(codes or "-")]
        if rule.replay:
            yield Check(rule.code, INAPPLICABLE, f"tilefit.precision.{rule.replay} checks it")
        elif missing:
            yield Check(rule.code, INAPPLICABLE, f"the run had no {missing[0]}")
        elif blocked:
            yield Check(rule.code, CANNOT, blocked[0])
        elif rule.closely and not looks:
            yield Check(rule.code, CANNOT, TOO_SHORT if numerics else NUMERICS_OFF)
        else:
            yield Check(rule.code, CHECKED, f"not: {rule.limit}" if rule.limit else "")
