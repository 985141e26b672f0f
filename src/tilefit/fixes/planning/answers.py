"""What becomes of each finding of a check: the same findings in the same order, each with who answers it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilefit.fixes.planning.plan import Plan
from tilefit.fixes.planning.registry import all_fixes
from tilefit.rules import Finding

if TYPE_CHECKING:
    from tilefit.fixes.source.patches import Patches


@dataclass(frozen=True)
class Answer:
    """What becomes of a finding.

    Attributes:
        code, level, gain_s, advice: Of the finding: the rule, its ``safety``, its saving alone, what to do.
        where: The module, or the file and line.
        fixes: The fixes that do it at run time.
        written: The line where it is written into the user's files; empty where it is not.
        reason: Why no fix does it; empty where one does.
        by_hand: Why it is not written; empty where it is.
    """

    code: str
    level: str
    gain_s: float
    advice: str
    where: str
    fixes: tuple[str, ...] = ()
    written: str = ""
    reason: str = ""
    by_hand: str = ""


def answers(
    findings: Iterable[Finding],
    remaining: Collection[str],
    plan: Plan | None,
    patches: Patches,
    levels: Sequence[str],
) -> tuple[Answer, ...]:
    """What becomes of the findings of a step.

    Args:
        findings: Of the step as it is, as a check ranks them.
        remaining: Codes of those that the changed step still has.
        plan: None for a target that is a function.
        patches: What is written.
        levels: Those of the fixes that may be made.
    """
    made, refused = (plan.fixes, plan.refused) if plan else ((), ())

    def answer(finding: Finding) -> Answer:
        code = finding.code
        fixes = tuple(dict.fromkeys(fix.name for fix in made if code in fix.rules))
        written = ", ".join(patch.where for patch in patches.made if patch.code == code)
        by_hand = next((each.reason for each in patches.by_hand if each.finding.code == code), "")
        reason = "" if fixes or written else why_not(code, by_hand)
        fixes = fixes if fixes or written or reason else ("the other changes",)
        where = finding.module or finding.source or "the whole step"
        how = code, finding.safety, finding.gain_s, finding.fix, where
        return Answer(*how, fixes, written, reason, by_hand)

    def why_not(code: str, by_hand: str) -> str:
        """Why nothing is made for a finding; empty where it is gone with what was made for others."""
        known = {fix.name: fix for fix in all_fixes() if code in fix.rules}
        for name in known:
            for each in refused:
                if each.name == name:
                    return each.reason
        if code not in remaining or by_hand:
            return by_hand if code in remaining else ""
        for name, fix in known.items():
            if fix.level not in levels:
                return f"{name} does it, and is {fix.level}: --level {fix.level}"
            if plan is None:
                return f"{name} does it at run time, to a model: tilefit.optimize"
            beside = " beside the other fixes" if made else ""
            return f"{name} does not reach it, or saves too little{beside}"
        return "no fix does it"

    return tuple(map(answer, findings))
