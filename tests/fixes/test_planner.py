"""Which fixes a plan takes, what it says, and that it takes them back."""

from __future__ import annotations

import copy
import json
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

import tilefit
from behaving import Change, Faster, Slow, nothing
from tilefit.errors import CaptureError, UsageError
from tilefit.fixes import ChangeSet, Context, Fix, Refusal, Run, Stage
from tilefit.fixes.changes.behaviour import behaviours
from tilefit.fixes.changes.fix import fix
from tilefit.fixes.planning import planner, registry

# So many rows that the GPU is what a step waits for.
X = torch.empty(131072, 1024, device="meta")


def slow(count: int = 1) -> nn.Sequential:
    layers = [layer for _ in range(count) for layer in (nn.Linear(1024, 64), Slow(), nn.Linear(64, 1024))]
    return nn.Sequential(*layers)


class Dropping(Faster):
    """Leaves them out: faster yet, and wrong."""

    called = "drop"
    does = staticmethod(nothing)


class Unsafe(Faster):
    called = "unsafe-faster"
    of_level = "unsafe"


class Talkative(Faster):
    """With Python that takes the host a tenth of a second."""

    host_s = 0.1


@pytest.fixture(autouse=True)
def only(monkeypatch: pytest.MonkeyPatch):
    """Makes some fixes the only ones there are; first ``faster``."""

    def set_fixes(*fixes: Fix) -> None:
        monkeypatch.setattr(registry, "all_fixes", lambda: fixes)

    set_fixes(Faster())
    return set_fixes


def optimize(model: nn.Module, inputs: Any = X, **options: Any) -> tilefit.Plan:
    return tilefit.optimize(model, inputs, **{"gpu": "h200", "optimizer": "none", **options})


def changed(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if behaviours(module)]


@pytest.fixture
def plan(only) -> tilefit.Plan:
    torch.manual_seed(0)
    return optimize(slow())


def test_what_pays_is_made_and_proven(plan: tilefit.Plan) -> None:
    assert [(fix.name, fix.modules) for fix in plan.fixes] == [("faster", ("1",))]
    assert plan.speedup > 1.01
    assert plan.fixes[0].gain_s == pytest.approx(plan.before_s - plan.after_s)
    assert plan.verification is not None
    assert plan.verification.ok
    assert changed(plan.model) == ["1"]


def test_what_is_predicted_is_what_a_check_of_the_changed_model_says(plan: tilefit.Plan) -> None:
    report = tilefit.check(plan.model, X, gpu="h200", optimizer="none")
    assert report.step.time_s == pytest.approx(plan.after_s)


def test_the_plan_as_text_and_data(plan: tilefit.Plan) -> None:
    assert "times as fast" in str(plan)
    data = json.loads(plan.to_json())
    assert data["schema_version"] == 1
    assert data["fixes"][0]["modules"] == ["1"]
    assert data["verification"]["ok"] is True
    assert data["speedup"] == pytest.approx(plan.speedup)
    assert "<pre" in plan._repr_html_()


def test_where_a_gpu_is_at_hand_a_plan_says_that_it_can_be_measured(
    plan: tilefit.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "measure=True" not in str(plan)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "measure=True" in str(plan)


def test_undo(plan: tilefit.Plan) -> None:
    plan.undo()
    assert not changed(plan.model)
    assert (plan.fixes, plan.speedup) == ((), 1.0)
    plan.undo()


def test_a_copy_if_asked_for_and_the_optimizer_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = slow()
    optimizer = torch.optim.AdamW(model.parameters())
    plan = optimize(model, inplace=False, optimizer=optimizer, select=["fuse-optimizer"])
    assert [fix.name for fix in plan.fixes] == ["fuse-optimizer"]
    assert optimizer.param_groups[0]["fused"] is None
    assert plan.model is not model


def test_a_model_that_nothing_is_to_be_changed_of() -> None:
    plan = optimize(nn.Sequential(nn.Linear(1024, 1024)))
    assert (plan.fixes, plan.speedup, plan.verification) == ((), 1.0, None)
    assert "Nothing worth changing" in str(plan)


class Reading(nn.Module):
    """Code that reads a value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(width, width), Slow()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.first(x))
        return x * 2 if x.sum() > 0 else x


def test_code_that_reads_a_value_is_planned_on_two_samples_of_real_data() -> None:
    model = Reading(64)
    x = torch.randn(8, 65536, 64)
    plan = optimize(model, x)
    assert [fix.name for fix in plan.fixes] == ["faster"]
    assert plan.run.inputs is x
    assert not plan.run.options.on_cpu
    assert plan.verification is not None
    on_cpu = tilefit.check(model, x, gpu="h200", optimizer="none", on_cpu=True)
    assert plan.after_s == pytest.approx(on_cpu.step.time_s, rel=0.02)


def test_a_large_model_whose_code_reads_a_value_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_MOST_WORK", 1e6)
    with pytest.raises(CaptureError, match="too large to be tried on real data"):
        optimize(Reading(64), torch.randn(8, 1024, 64))


def test_a_rule_that_no_fix_answers_selects_none() -> None:
    assert not optimize(slow(), select=["ALN"]).fixes
    assert optimize(slow(), select=["PRC"]).fixes
    assert not optimize(slow(), select=["PRC"], ignore=["PRC004"]).fixes


def test_many_refusals_are_counted(only) -> None:
    class Choosy(Faster):
        def found(self, context: Context) -> list[Refusal]:
            return [Refusal((f"{number}",), "it is what it is") for number in range(9)]

    only(Choosy())
    told = str(optimize(slow()))
    assert told.count("it is what it is") == 5
    assert "and 4 more in plan.refused" in told


def test_no_time_no_search() -> None:
    assert optimize(slow(), budget=0.0).fixes == ()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"level": "safest"}, "unknown level"),
        ({"gpu": ["h200", "l4"]}, "one GPU"),
        ({"gpu": "h2000"}, "h2000"),
        ({"select": ["fastr"]}, "fastr"),
        ({"select": "fastr"}, "fastr"),
        ({"optimizer": "adamx"}, "adamx"),
    ],
)
def test_options_that_are_not_understood(options: dict[str, Any], match: str) -> None:
    with pytest.raises(tilefit.TilefitError, match=match):
        optimize(slow(), **options)


def test_what_cannot_be_optimized() -> None:
    with pytest.raises(UsageError, match="function cannot be optimized"):
        optimize(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="compiled already"):
        optimize(torch.compile(slow()))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="scripted or traced"):
        optimize(torch.jit.trace(slow(), torch.randn(2, 1024)))


# ---- the search --------------------------------------------------------------------------------


def test_a_change_of_the_function_is_refused_and_says_why_and_the_rest_is_made(only) -> None:
    only(Dropping(), Faster())
    model = slow(2)
    plan = optimize(model)
    assert {fix.name for fix in plan.fixes} == {"faster"}
    assert changed(model) == ["1", "4"]
    reasons = {each.modules: each.reason for each in plan.refused if each.name == "drop"}
    assert set(reasons) == {("1",), ("4",)}
    assert all("not proven the same" in reason for reason in reasons.values())
    assert "eval: output" in reasons["1",]


def test_unsafe_fixes_only_where_asked_for(only) -> None:
    only(Unsafe())
    assert not optimize(slow(), verify=False).fixes
    plan = optimize(slow(), level="unsafe", verify=False)
    assert [fix.level for fix in plan.fixes] == ["unsafe"]
    assert re.search(r"unsafe-faster .* unsafe ", str(plan))


def test_gains_are_on_top_of_each_other() -> None:
    plan = optimize(slow(2))
    assert len(plan.fixes) == 2
    assert sum(fix.gain_s for fix in plan.fixes) == pytest.approx(plan.before_s - plan.after_s)
    assert plan.fixes[0].verification is plan.fixes[1].verification


def test_an_error_on_the_way_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: Run, changes: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(planner, "prove", fail)
    model = slow()
    with pytest.raises(KeyboardInterrupt):
        optimize(model)
    assert not changed(model)


def test_where_new_tensors_go_by_default_does_not_matter() -> None:
    with torch.device("meta"):
        plan = optimize(slow())
    assert len(plan.fixes) == 1


def test_python_that_takes_the_host_longer_than_it_saves_is_priced(only) -> None:
    only(Talkative())
    assert not optimize(slow()).fixes
    plan = optimize(slow(), min_gain=-1e9)
    assert plan.after_s > plan.before_s + 0.05


def test_what_pays_on_this_host_and_not_on_a_slow_one_is_left_alone(only) -> None:
    class Tight(Faster):
        """The GPU hides its Python, but not where that takes three times as long."""

        host_s = 8e-3

    only(Tight())
    plan = optimize(slow(), torch.empty(2**20, 1024, device="meta"))
    assert not plan.fixes
    assert "where the host takes 3 times as long" in plan.refused[0].reason
    assert len(optimize(slow(), min_gain=-1e9).fixes) == 1


def test_what_is_done_is_told(only) -> None:
    told: list[str] = []
    options = tilefit.fixes.planning.planner.StepOptions(optimizer="none")
    planner.make_plan(
        Run(slow(), X, options), planner.resolve("h200")[0], tilefit.options.Selection(), say=told.append
    )
    assert told == ["Pricing the step as it is", "Pricing faster", "Proving faster"]


@fix("run", stage=Stage.RUN)
def together(context: Context) -> list[ChangeSet]:
    """A way to run the program that calls for changes of the model."""
    return [] if context.run.cuda_graph else [Replayed(())]


class Replayed(Change):
    def __init__(self, modules: tuple[str, ...]) -> None:
        super().__init__(modules, nothing)

    def make(self, run: Run, edits: Any) -> None:
        edits.set(run, "cuda_graph", True)


class OnlyThen(Faster):
    def found(self, context: Context) -> Any:
        return self.changes(context) if context.run.cuda_graph else ()


def test_what_only_a_way_to_run_calls_for_is_made_with_it(only) -> None:
    only(together, OnlyThen())
    plan = optimize(slow(), torch.empty(64, 1024, device="meta"))
    assert [fix.name for fix in plan.fixes] == ["run"]
    assert len(plan.candidates[0].changes) == 2
    assert changed(plan.model) == ["1"]
    assert plan.verification is not None
    plan.undo()
    assert not changed(plan.model)
    assert not plan.run.cuda_graph


@pytest.mark.parametrize("of", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_a_copy_of_a_plan_takes_its_own_changes_back(of: Any, plan: tilefit.Plan) -> None:
    other = of(plan)
    assert str(other) == str(plan)
    assert other.model is other.run.model is not plan.model
    other.undo()
    assert not changed(other.model)
    assert changed(plan.model)


# ---- the plain model ---------------------------------------------------------------------------


@pytest.mark.parametrize("of", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_strip_takes_every_fix_off_a_model_or_a_copy_of_it(of: Any, plan: tilefit.Plan) -> None:
    model = of(plan.model)
    assert changed(model)
    assert tilefit.strip(model) is model
    assert not any("forward" in vars(module) for module in model.modules())
    x = torch.randn(3, 1024)
    assert torch.equal(model(x), plan.model(x))


def test_strip_takes_off_layers_and_compilers_and_leaves_parameters_as_they_are() -> None:
    model = nn.ModuleDict({"rnn": nn.LSTM(4, 4), "conv": nn.Conv2d(4, 4, 3), "act": nn.ReLU()})
    tilefit.nn.convert(model)
    model["conv"].to(memory_format=torch.channels_last)
    model["act"].compile()
    weight = model["conv"].weight
    tilefit.strip(model)
    assert type(model["rnn"]) is nn.LSTM
    assert model["conv"].weight is weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert model["act"]._compiled_call_impl is None
