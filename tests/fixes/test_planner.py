"""Which fixes a plan takes, what it says, and that it takes them back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import tilefit
from tilefit.errors import CaptureError, UsageError
from tilefit.fixes import ChangeSet, Context, Fix, Run, Undo, planner, registry
from tilefit.fixes.linear import PaddedLinear, PadLinear

# So many rows that the GPU is what a step waits for.
X = torch.empty(131072, 1024, device="meta")


def odd() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 4095), nn.GELU(), nn.Linear(4095, 1024))


def healthy() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))


def optimize(model: nn.Module, inputs: Any = X, **options: Any) -> tilefit.Plan:
    return tilefit.optimize(model, inputs, **{"gpu": "h200", "amp": "bf16", "select": ["ALN"], **options})


@pytest.fixture(scope="module")
def plan() -> tilefit.Plan:
    """That of a model whose hidden layer is of an odd size; no test changes it."""
    torch.manual_seed(0)
    return optimize(odd())


def test_a_misaligned_model_is_padded_and_proven(plan: tilefit.Plan) -> None:
    model: Any = plan.model
    assert [fix.name for fix in plan.fixes] == ["pad-linear"]
    assert plan.fixes[0].modules == ("0", "2")
    assert plan.speedup > 1.5
    assert plan.fixes[0].gain_s == pytest.approx(plan.before_s - plan.after_s)
    assert plan.verification is not None
    assert plan.verification.ok
    assert all(isinstance(model[i], PaddedLinear) for i in (0, 2))


def test_what_is_predicted_is_what_a_check_of_the_changed_model_says(plan: tilefit.Plan) -> None:
    report = tilefit.check(plan.model, X, gpu="h200", amp="bf16")
    assert report.step.time_s == pytest.approx(plan.after_s)
    assert not [finding for finding in report.findings if finding.code == "ALN001"]


def test_code_that_depends_on_values_is_not_told_of_an_option_that_is_not_there() -> None:
    class Reading(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(CaptureError) as caught:
        optimize(Reading())
    assert "on_cpu=True" not in str(caught.value)
    assert "shapes alone" in str(caught.value)


def test_a_healthy_model_is_left_alone() -> None:
    model = healthy()
    plan = optimize(model)
    assert plan.fixes == ()
    assert plan.speedup == 1.0
    assert plan.verification is None
    assert "Nothing worth changing" in str(plan)
    assert all(type(module) in (nn.Sequential, nn.Linear, nn.GELU) for module in model.modules())


def test_where_copies_cost_more_than_they_save_nothing_is_padded() -> None:
    assert optimize(odd(), torch.empty(16, 1024, device="meta")).fixes == ()


def test_without_tensor_cores_there_is_nothing_to_align() -> None:
    assert optimize(odd(), amp="", tf32=False).fixes == ()


def test_undo() -> None:
    model = odd()
    plan = optimize(model)
    assert plan.model is model
    plan.undo()
    assert [type(module) for module in model] == [nn.Linear, nn.GELU, nn.Linear]
    assert (plan.fixes, plan.speedup) == ((), 1.0)
    plan.undo()


def test_a_copy_if_asked_for() -> None:
    model = odd()
    plan = optimize(model, inplace=False)
    assert type(model[0]) is nn.Linear
    assert isinstance(plan.model[0], PaddedLinear)
    assert plan.model[0].weight is not model[0].weight


def test_the_plan_as_text_and_data(plan: tilefit.Plan) -> None:
    text = str(plan)
    assert "times as fast" in text
    assert "4095 to 4096" in " ".join(text.split())
    data = json.loads(plan.to_json())
    assert data["schema_version"] == 1
    assert data["fixes"][0]["modules"] == ["0", "2"]
    assert data["verification"]["ok"] is True
    assert data["speedup"] == pytest.approx(plan.speedup)
    assert "<pre" in plan._repr_html_()


def test_no_time_no_search() -> None:
    assert optimize(odd(), budget=0.0).fixes == ()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"level": "safest"}, "unknown level"),
        ({"gpu": ["h200", "l4"]}, "one GPU"),
        ({"gpu": "h2000"}, "h2000"),
        ({"select": ["pad-lineer"]}, "pad-lineer"),
        ({"select": "pad-lineer"}, "pad-lineer"),
        ({"optimizer": "adamx"}, "adamx"),
    ],
)
def test_options_that_are_not_understood(options: dict[str, Any], match: str) -> None:
    with pytest.raises(tilefit.TilefitError, match=match):
        optimize(odd(), **options)


def test_what_cannot_be_optimized() -> None:
    with pytest.raises(UsageError, match="function cannot be optimized"):
        optimize(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="compiled already"):
        optimize(torch.compile(odd()))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="scripted or traced"):
        optimize(torch.jit.trace(odd(), torch.randn(2, 1024)))


# ---- the search, with fixes made for the purpose -----------------------------------------------


@dataclass(frozen=True)
class Swapping(ChangeSet):
    """Puts another module in a place."""

    put: type[nn.Module] = nn.Identity

    @property
    def summary(self) -> str:
        return f"Put {self.put.__name__} at {self.modules[0]}."

    def apply(self, run: Run) -> Undo:
        kept = run.model.get_submodule(self.modules[0])
        run.model.set_submodule(self.modules[0], self.put())
        return lambda: run.model.set_submodule(self.modules[0], kept)


class Dropping(Fix):
    """Leaves out activations: fast, and wrong."""

    name = "drop"
    rules = ()

    def find(self, context: Context) -> Iterable[ChangeSet]:
        for path, module in context.run.model.named_modules():
            if isinstance(module, nn.GELU):
                yield Swapping((path,))


class Unsafe(Dropping):
    name = "unsafe-drop"
    level = "unsafe"


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch):
    """Makes some fixes the only ones there are."""

    def set_fixes(*fixes: Fix) -> None:
        monkeypatch.setattr(registry, "all_fixes", lambda: fixes)

    return set_fixes


def test_a_change_of_the_function_is_refused_and_says_why(only) -> None:
    only(Dropping())
    model = healthy()
    plan = optimize(model, select=["drop"])
    assert plan.fixes == ()
    assert isinstance(model[1], nn.GELU)
    assert plan.refused[0].modules == ("1",)
    assert "not proven the same" in plan.refused[0].reason
    assert "output" in plan.refused[0].reason


def test_unsafe_fixes_only_where_asked_for(only) -> None:
    only(Unsafe())
    assert not optimize(healthy(), select=[], verify=False).fixes
    plan = optimize(healthy(), select=[], level="unsafe", verify=False)
    assert [fix.level for fix in plan.fixes] == ["unsafe"]
    assert "(unsafe)" in str(plan)


def test_gains_are_on_top_of_each_other(only) -> None:
    only(PadLinear(), Dropping())
    model = nn.Sequential(*odd(), *odd())
    plan = optimize(model, select=[], verify=False)
    assert {fix.name for fix in plan.fixes} == {"pad-linear", "drop"}
    assert sum(fix.gain_s for fix in plan.fixes) == pytest.approx(plan.before_s - plan.after_s)
    plan.undo()
    assert [type(module) for module in model] == [nn.Linear, nn.GELU, nn.Linear] * 2


def test_an_error_on_the_way_leaves_the_model_as_it_was(only, monkeypatch: pytest.MonkeyPatch) -> None:
    only(PadLinear(), Dropping())
    model = odd()

    def fail(run: Run, candidate: ChangeSet) -> Any:
        if isinstance(candidate, Swapping):
            raise KeyboardInterrupt
        return prove(run, candidate)

    prove = planner.prove
    monkeypatch.setattr(planner, "prove", fail)
    with pytest.raises(KeyboardInterrupt):
        optimize(model, select=[])
    assert [type(module) for module in model] == [nn.Linear, nn.GELU, nn.Linear]


def test_where_new_tensors_go_by_default_does_not_matter() -> None:
    expected = optimize(odd(), select=[])
    with torch.device("meta"):
        plan = optimize(odd(), select=[])
    assert [fix.name for fix in plan.fixes] == [fix.name for fix in expected.fixes]
    assert plan.verification is not None
    assert plan.verification.ok
