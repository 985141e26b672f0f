"""The engine with rules made for the test, so that its arithmetic is seen alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from builders import StepBuilder
from tilefit.cost import estimate, estimate_step
from tilefit.errors import UsageError
from tilefit.gpus import Gpu
from tilefit.ops import Gemm, Step
from tilefit.ops.scaling import scale_batch
from tilefit.options import Selection
from tilefit.rules import (
    Change,
    Context,
    Finding,
    Place,
    Proposal,
    Rule,
    combinations,
    engine,
    find,
    run,
    safe_gain_s,
)


def proposal(change: Change | None, module: str = "a", severity: str = "", safety: str = "safe") -> Proposal:
    return Proposal(Place(module, "model.py:1"), "message", "fix", safety, change, severity=severity)


@pytest.fixture
def step() -> Step:
    b = StepBuilder(training=False)
    b.linear("a", 16384, 4096, 4096)
    b.linear("b", 16384, 4096, 4096)
    b.linear("c", 16384, 4096, 4096)
    return b.step()


@pytest.fixture
def run_with(monkeypatch: pytest.MonkeyPatch, h200: Gpu) -> Callable[..., list[Finding]]:
    """Runs the engine with one rule that proposes what it is given."""

    def call(step: Step, *proposals: Proposal, **options: object) -> list[Finding]:
        class Made(Rule):
            code = "TST001"
            title = "made for the test"

            def check(self, context: Context) -> Iterable[Proposal]:
                return proposals

        monkeypatch.setattr(engine, "select_rules", lambda *_: (Made(),))
        return run(step, h200, **options)  # type: ignore[arg-type]

    return call


def test_half_the_work_of_one_of_three_equal_layers_is_a_sixth(step: Step, run_with) -> None:
    half = replace(step.ops[0], op=Gemm(8192, 4096, 4096))
    (finding,) = run_with(step, proposal(Change({0: (half,)})))
    assert finding.gain_fraction == pytest.approx(1 / 6, rel=0.05)
    assert 0 < finding.gain_low_s < finding.gain_s < finding.gain_high_s
    assert finding.severity == "warning"


def test_an_operation_can_be_removed_or_become_several(step: Step, run_with, h200: Gpu) -> None:
    (gone,) = run_with(step, proposal(Change({1: ()})))
    assert gone.gain_s == pytest.approx(estimate(step.ops[1].op, h200).time_s, rel=0.05)
    quarter = replace(step.ops[1], op=Gemm(4096, 4096, 4096))
    (split,) = run_with(step, proposal(Change({1: (quarter, quarter)})))
    assert split.gain_s == pytest.approx(gone.gain_s / 2, rel=0.1)


def test_a_larger_batch_is_judged_by_its_time_for_the_same_work(run_with) -> None:
    b = StepBuilder(batch=8)
    b.linear("a", 8, 4096, 4096)
    step = b.step()
    scaled = scale_batch(step, 4)
    change = Change({i: (entry,) for i, entry in enumerate(scaled.ops)}, work_ratio=4)
    (finding,) = run_with(step, proposal(change))
    # Both read the same weights, which is all the time there is: four times the work costs once as much.
    assert finding.gain_fraction == pytest.approx(3 / 4, rel=0.02)
    # It cannot do more than four times the work in the time.
    assert finding.gain_s <= finding.gain_high_s <= finding.gain_s / finding.gain_fraction * 3 / 4 * 1.000001


def test_what_is_not_worth_it_is_dropped(step: Step, run_with) -> None:
    worse = replace(step.ops[0], op=Gemm(16384, 4224, 4096))
    same = replace(step.ops[0], op=Gemm(16384, 4096, 4096))
    # 2 % less of one product: below the noise of the product itself, though above 0.5 % of the step.
    little = replace(step.ops[0], op=Gemm(16384, 4096, 4032))
    for after in (worse, same, little):
        assert run_with(step, proposal(Change({0: (after,)}))) == []
    assert run_with(step, proposal(Change({0: ()})), min_gain=0.5) == []


def test_ranked_by_gain_with_errors_first(step: Step, run_with) -> None:
    found = run_with(
        step,
        proposal(Change({0: ()}), "one"),
        proposal(Change({0: (), 1: ()}), "two"),
        proposal(None, "cannot run", severity="error"),
    )
    assert [f.module for f in found] == ["cannot run", "two", "one"]
    assert found[0].severity == "error"
    assert found[0].gain_s == 0


def test_a_small_gain_is_a_note(run_with) -> None:
    b = StepBuilder(training=False)
    b.linear("small", 8192, 2048, 2048)
    for i in range(4):
        b.linear(f"large{i}", 16384, 4096, 4096)
    (finding,) = run_with(b.step(), proposal(Change({0: ()})))
    assert 0.005 < finding.gain_fraction < 0.05
    assert finding.severity == "note"


def test_rules_can_be_silenced_by_module(step: Step, run_with) -> None:
    change = Change({0: ()})
    ignored = {"transformer.h.*": ["TST"]}
    assert run_with(step, proposal(change, "transformer.h.*.mlp"), per_module_ignores=ignored) == []
    assert len(run_with(step, proposal(change, "lm_head"), per_module_ignores=ignored)) == 1


def test_unknown_codes_are_refused(step: Step, h200: Gpu) -> None:
    with pytest.raises(UsageError):
        run(step, h200, select=["ALM001"])
    with pytest.raises(UsageError):
        run(step, h200, per_module_ignores={"a": ["ALM001"]})


def test_the_interval_of_equal_sites_adds_up(run_with) -> None:
    """Twelve equal layers are wrong in the same way: their interval is twelve times as wide."""
    b = StepBuilder(training=False)
    for i in range(12):
        b.linear(f"h.{i}", 16384, 4096, 4096)
    step = b.step()
    (one,) = run_with(step, proposal(Change({0: ()})))
    (twelve,) = run_with(step, proposal(Change(dict.fromkeys(range(12), ()))))
    assert twelve.gain_high_s - twelve.gain_low_s == pytest.approx(
        12 * (one.gain_high_s - one.gain_low_s), rel=1e-6
    )


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch, h200: Gpu, step: Step, run_with) -> Callable[..., float]:
    """What the proposals that are safe save together."""

    def call(*proposals: Proposal) -> float:
        run_with(step, *proposals)
        context = Context(step, h200, estimate_step(step, h200))
        found = find(context, Selection())
        return safe_gain_s(context, found, combinations(context, found))

    return call


def test_safe_changes_of_different_operations_are_priced_in_one(step: Step, together, h200: Gpu) -> None:
    changes = (proposal(Change({0: ()}), "a"), proposal(Change({1: ()}), "b"))
    after = estimate_step(replace(step, ops=step.ops[2:]), h200)
    assert together(*changes) == pytest.approx(estimate_step(step, h200).time_s - after.time_s)
    assert together(*changes) > together(changes[0])


def test_an_operation_that_two_findings_change_counts_once(together) -> None:
    both = proposal(Change({0: (), 1: ()}), "both")
    assert together(both, proposal(Change({1: ()}), "one"), proposal(Change({0: ()}), "other")) == together(
        both
    )


def test_what_is_not_safe_or_has_no_price_saves_nothing(together) -> None:
    assert together() == 0.0
    assert (
        together(proposal(Change({0: ()}), safety="unsafe"), proposal(Change({1: ()}), safety="advice"))
        == 0.0
    )
    assert together(proposal(None, severity="error")) == 0.0


def test_a_change_of_the_whole_step_stands_alone(step: Step, together) -> None:
    small = proposal(Change({0: ()}), "one")
    large = proposal(Change(step=replace(step, ops=step.ops[:1])), "whole")
    # Each of them where it is the better one; the two are never added up.
    assert together(small, large) == together(large) > together(small)
    tiny = replace(step.ops[0], op=Gemm(15360, 4096, 4096))
    whole = proposal(Change(step=replace(step, ops=(tiny, *step.ops[1:]))), "whole")
    assert together(small, whole) == together(small) > together(whole) > 0


def test_compilation_is_priced_on_top_of_other_changes(step: Step, together, h200: Gpu) -> None:
    """It is made of the changed step, so that what both save counts once."""

    def shorter(of: Step) -> Step:
        return replace(of, ops=of.ops[1:])

    first = proposal(Change({0: (), 1: ()}), "first")
    whole = proposal(Change(step=shorter(step), rewrite=shorter), "whole")
    after = estimate_step(shorter(replace(step, ops=step.ops[2:])), h200)
    assert together(first, whole) == pytest.approx(estimate_step(step, h200).time_s - after.time_s)
    assert together(first, whole) > max(together(first), together(whole))


def test_safe_changes_that_do_not_suit_the_others_are_left_out(step: Step, together) -> None:
    """As attention in one kernel, of which a compiled step has no use any more."""

    def without_first(of: Step) -> Step:
        return replace(of, ops=tuple(each for each in of.ops if each != step.ops[0]))

    smaller = replace(step.ops[0], op=Gemm(8192, 4096, 4096))
    compiled = Change(step=without_first(step), rewrite=without_first)
    changes = [Change({0: (smaller,)}), Change({2: ()}), compiled]
    first, last, whole = (proposal(change, str(index)) for index, change in enumerate(changes))
    assert together(first, last, whole) == pytest.approx(together(last, whole))
    assert together(first, last, whole) > max(together(whole), together(first, last))


def test_every_choice_of_findings_has_a_time(step: Step, run_with, h200: Gpu) -> None:
    changes = (Change({0: ()}), Change({1: ()}), Change({0: (), 1: ()}))
    run_with(step, *(proposal(change, str(index)) for index, change in enumerate(changes)))
    context = Context(step, h200, estimate_step(step, h200))
    found = find(context, Selection())
    times = dict(combinations(context, found))
    assert len(times) == 2 ** len(found) - 1
    for chosen, time_s in times.items():
        parts = [times[part] for part in times if set(part) < set(chosen)]
        assert time_s <= min(parts, default=context.estimate.time_s)
        saved = context.estimate.time_s - time_s
        assert saved <= sum(found[index].finding.gain_s for index in chosen) * (1 + 1e-9)
    both = next(i for i, each in enumerate(found) if each.finding.module == "2")
    assert times[tuple(range(len(found)))] == pytest.approx(
        times[(both,)]
    )  # what one change does is not saved again


def test_of_two_that_save_as_much_the_safe_one_comes_first(step: Step, run_with) -> None:
    same = Change({0: ()})
    found = run_with(step, proposal(same, "a", safety="unsafe"), proposal(same, "b", safety="safe"))
    assert [finding.module for finding in found] == ["b", "a"]


def test_what_the_host_saves_is_as_uncertain_as_the_host(run_with) -> None:
    """Small layers: half of the launches are half of the step, on a fast host and on a slow one."""
    b = StepBuilder(training=False)
    for i in range(40):
        b.linear(f"h.{i}", 16, 64, 64)
    (finding,) = run_with(b.step(), proposal(Change(dict.fromkeys(range(20), ()))))
    assert finding.gain_fraction == pytest.approx(0.5, abs=0.05)
    assert finding.gain_low_s < 0.7 * finding.gain_s
    assert finding.gain_high_s > 1.5 * finding.gain_s
