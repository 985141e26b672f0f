"""One-line mistakes in healthy programs: those that change what is learnt are found, the others are silent.

All of them are run by ``benchmarks/precision_mutations.py``.
"""

from __future__ import annotations

import pytest

from precision.mutations import PROGRAMS, judge, mutations, original, run
from tilefit.rules.finding import NOTE

#: Small programs, of several shapes.
SOME = ("by_hand", "clipped", "two_losses")


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_program_is_healthy_as_it_is(name: str) -> None:
    ran = run(original(name), watched=True)
    assert ran.raised == ""
    assert [alarm for alarm in ran.alarms if alarm.severity != NOTE] == []


@pytest.mark.parametrize("name", SOME)
def test_a_mutation_that_changes_training_is_found_and_no_other(name: str) -> None:
    verdicts = {str(mutation): judge(mutation) for mutation in mutations(name)}
    wrong = [mutation for mutation, verdict in verdicts.items() if verdict in ("missed", "accused")]
    # What is left of a step, its scale divided out by hand, looks like any gradient without one.
    assert wrong in ([], ["by_hand: drop opt.zero_grad()"])


def test_there_are_mutations_of_every_kind() -> None:
    found = [mutation for name in PROGRAMS for mutation in mutations(name)]
    assert len(found) >= 200
    assert {mutation.kind for mutation in found} == {"drop", "double", "swap", "move"}
