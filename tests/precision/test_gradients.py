"""The table of transitions: every cell, against a model that keeps a gradient's parts themselves."""

from __future__ import annotations

import pytest

from tilefit.precision.gradients import HAND, TRANSITIONS, Cause, Kind, Mark, State

A, B = Mark(0, 1), Mark(0, 2)
PLAIN: Mark | None = None
#: A gradient of each kind, as the scales of its parts.
PARTS: dict[Kind, list[Mark | None]] = {
    Kind.NONE: [],
    Kind.PLAIN: [PLAIN],
    Kind.SCALED: [A],
    Kind.MIXED: [A, PLAIN],
    Kind.SPREAD: [A, B],
    Kind.DIVIDED: [PLAIN],
}
ADDED = {
    Cause.ADD_PLAIN: [PLAIN],
    Cause.ADD_SAME: [A],
    Cause.ADD_OTHER: [B],
}
USED = (Kind.USED, Kind.SPENT, Kind.LEFT)


def _kind(parts: list[Mark | None]) -> Kind:
    """What a gradient of these parts is."""
    scales = {part for part in parts if part is not None}
    if not parts:
        return Kind.NONE
    if not scales:
        return Kind.PLAIN
    if len(scales) < len(set(parts)):
        return Kind.MIXED
    return Kind.SCALED if len(scales) == 1 else Kind.SPREAD


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("cause", Cause)
def test_every_state_has_an_answer_to_every_cause(kind: Kind, cause: Cause) -> None:
    after, finding = TRANSITIONS[kind, cause]
    assert isinstance(after, Kind)
    assert finding == "" or kind not in (Kind.NONE, Kind.UNKNOWN, Kind.SPENT)


@pytest.mark.parametrize("cause", ADDED)
@pytest.mark.parametrize("kind", PARTS)
def test_what_a_backward_pass_adds_is_one_more_part(kind: Kind, cause: Cause) -> None:
    added = ADDED[cause] if not (kind is Kind.NONE and cause is Cause.ADD_OTHER) else [A, B]
    assert TRANSITIONS[kind, cause] == (_kind(PARTS[kind] + added), "")


@pytest.mark.parametrize("cause", ADDED)
def test_what_is_added_to_a_used_gradient_counts_only_if_that_was_seen_to_be_left(cause: Cause) -> None:
    assert TRANSITIONS[Kind.LEFT, cause] == (_kind([PLAIN, *ADDED[cause]]), "")
    assert TRANSITIONS[Kind.USED, cause] == (Kind.UNKNOWN, "")
    assert TRANSITIONS[Kind.SPENT, cause] == (Kind.UNKNOWN, "")


@pytest.mark.parametrize("kind", Kind)
def test_what_nobody_saw_makes_a_gradient_unknown_and_clearing_makes_it_known(kind: Kind) -> None:
    assert TRANSITIONS[kind, Cause.WRITTEN] == (Kind.UNKNOWN, "")
    assert TRANSITIONS[kind, Cause.ADD_UNKNOWN] == (Kind.UNKNOWN, "")
    assert TRANSITIONS[kind, Cause.CLEARED] == (Kind.NONE, "")


@pytest.mark.parametrize("cause", Cause)
def test_nothing_but_clearing_and_dividing_makes_an_unknown_gradient_known(cause: Cause) -> None:
    after = TRANSITIONS[Kind.UNKNOWN, cause]
    known = {
        Cause.CLEARED: Kind.NONE,
        Cause.UNSCALE_OWN: Kind.DIVIDED,
        Cause.UNSCALE_OTHER: Kind.DIVIDED,
        Cause.USED: Kind.SPENT,
    }
    assert after == (known.get(cause, Kind.UNKNOWN), "")


@pytest.mark.parametrize("kind", [*PARTS, Kind.USED, Kind.SPENT, Kind.LEFT])
def test_what_commutes_keeps_the_scale_but_not_that_a_gradient_was_used(kind: Kind) -> None:
    for cause in (Cause.KEPT, Cause.CLIPPED):
        assert TRANSITIONS[kind, cause][0] == (Kind.UNKNOWN if kind in USED else kind)


@pytest.mark.parametrize(
    ("kind", "own", "other"),
    [
        (Kind.NONE, "", ""),
        (Kind.PLAIN, "plain", "plain"),
        (Kind.SCALED, "", "older"),
        (Kind.MIXED, "mixed", "mixed"),
        (Kind.SPREAD, "spread", "spread"),
        (Kind.DIVIDED, "again", "again"),
        (Kind.USED, "repeated", "repeated"),
        (Kind.SPENT, "", ""),
        (Kind.LEFT, "repeated", "repeated"),
        (Kind.UNKNOWN, "", ""),
    ],
)
def test_unscale_is_right_for_one_scale_that_is_its_own(kind: Kind, own: str, other: str) -> None:
    divided = Kind.DIVIDED if kind not in (Kind.NONE, *USED) else {Kind.SPENT: Kind.UNKNOWN}.get(kind, kind)
    assert TRANSITIONS[kind, Cause.UNSCALE_OWN] == (divided, own)
    assert TRANSITIONS[kind, Cause.UNSCALE_OTHER] == (divided, other)


@pytest.mark.parametrize(
    ("kind", "after", "finding"),
    [
        (Kind.NONE, Kind.NONE, ""),
        (Kind.PLAIN, Kind.PLAIN, "again"),
        (Kind.SCALED, Kind.PLAIN, ""),
        (Kind.MIXED, Kind.UNKNOWN, "mixed"),
        (Kind.SPREAD, Kind.UNKNOWN, "spread"),
        (Kind.DIVIDED, Kind.DIVIDED, "again"),
        (Kind.USED, Kind.UNKNOWN, ""),
        (Kind.SPENT, Kind.UNKNOWN, ""),
        (Kind.LEFT, Kind.UNKNOWN, ""),
    ],
)
def test_dividing_by_hand_is_right_for_one_scale(kind: Kind, after: Kind, finding: str) -> None:
    assert TRANSITIONS[kind, Cause.UNSCALED] == (after, finding)


@pytest.mark.parametrize(
    ("kind", "clipped", "stepped"),
    [
        (Kind.NONE, "", ""),
        (Kind.PLAIN, "hand", ""),
        (Kind.SCALED, "clipped", "stepped"),
        (Kind.MIXED, "clipped", "mixed"),
        (Kind.SPREAD, "clipped", "stepped"),
        (Kind.DIVIDED, "", ""),
        (Kind.USED, "", "repeated"),
        (Kind.SPENT, "", ""),
        (Kind.LEFT, "", "repeated"),
    ],
)
def test_clipping_and_stepping_take_gradients_without_a_scale(kind: Kind, clipped: str, stepped: str) -> None:
    assert TRANSITIONS[kind, Cause.CLIPPED][1] == clipped
    assert TRANSITIONS[kind, Cause.STEPPED] == (kind, stepped)


@pytest.mark.parametrize("kind", Kind)
def test_a_used_gradient_is_told_by_whether_it_was_plain(kind: Kind) -> None:
    plain = {Kind.NONE: Kind.NONE, Kind.PLAIN: Kind.USED, Kind.DIVIDED: Kind.USED, Kind.LEFT: Kind.USED}
    used = {**plain, Kind.USED: Kind.USED}.get(kind, Kind.SPENT)
    assert TRANSITIONS[kind, Cause.USED] == (used, "")
    assert TRANSITIONS[kind, Cause.SEEN] == (Kind.LEFT if kind is Kind.USED else kind, "")


def test_marks_follow_a_gradient_until_it_is_divided_or_used() -> None:
    state = State()
    for marks in ({A}, {A}):
        state, wrong = state.after(state.adding(frozenset(marks)), frozenset(marks))
        assert (state.kind, state.marks, wrong) == (Kind.SCALED, {A}, "")
    state, _ = state.after(state.adding(frozenset({B})), frozenset({B}))
    assert (state.kind, state.marks) == (Kind.SPREAD, {A, B})
    state, wrong = state.after(Cause.UNSCALE_OTHER)
    assert (state, wrong) == (State(Kind.DIVIDED), "spread")


def test_a_constant_is_no_scale_until_it_is_divided_out() -> None:
    constant = frozenset({Mark(HAND, 0, 1024.0)})
    state, _ = State().after(State().adding(constant), constant)
    assert (state.kind, state.by_hand) == (Kind.PLAIN, 1024.0)
    assert not state.scaled
