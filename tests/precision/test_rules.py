"""The rules as documentation, and what each says about an event."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from tilefit.precision.rules import PrecisionRule, all_rules
from tilefit.precision.rules.autocast import LossInHalfPrecision
from tilefit.precision.rules.numerics import ReductionInHalf
from tilefit.precision.rules.protocol import misuse
from tilefit.precision.rules.scaler import ScaleCollapse, ScheduleAdvancesOnSkip, refused
from tilefit.precision.rules.storage import (
    AccumulationNotAveraged,
    HalfAccumulator,
    LowPrecisionGradientSum,
    Movement,
    OptimizerStateInHalf,
    UpdateBelowUlp,
)


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_a_page_has_what_a_reader_needs(rule: PrecisionRule) -> None:
    page = inspect.getdoc(type(rule)) or ""
    for part in ("What it sees:", "Why nobody notices:", "Wrong:", "Right:", "Source:"):
        assert part in page, part
    assert rule.title[0].islower()


def test_rules_are_numbered_without_a_gap() -> None:
    assert [rule.code for rule in all_rules()] == [f"AMP{number:03}" for number in range(1, 32)]


def test_rules_do_not_import_torch() -> None:
    code = (
        "import sys; from tilefit.precision.rules import all_rules; all_rules();"
        " print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def _severities(event: PrecisionRule) -> list[str]:
    alarm = event.judge()
    return [] if alarm is None else [alarm.severity]


def _operation(**values: float) -> ReductionInHalf:
    figures = {"overflowed": 0.0, "vanished": 0.0, "error_ulp": 0.0, "largest": 1.0} | values
    return ReductionInHalf(operation="pow", dtype="float16", **figures)


@pytest.mark.parametrize(
    ("event", "found"),
    [
        (_operation(error_ulp=0.5), False),
        (_operation(error_ulp=8.0), False),
        (_operation(error_ulp=8.1), True),
        (_operation(vanished=0.5), False),
        (_operation(vanished=0.51), True),
        (_operation(overflowed=1e-6), True),
    ],
)
def test_an_operation_is_judged_by_its_error(event: ReductionInHalf, found: bool) -> None:
    assert bool(event.judge()) is found


@pytest.mark.parametrize(("projection", "found"), [(0.0, True), (0.49, True), (0.5, False), (0.997, False)])
@pytest.mark.parametrize("rule", [UpdateBelowUlp, HalfAccumulator])
def test_lost_movement(rule: type[Movement], projection: float, found: bool) -> None:
    event = rule(dtype="bfloat16", steps=32, projection=projection, number=100)
    assert bool(event.judge()) is found


@pytest.mark.parametrize(
    ("confirmed", "severities"),
    [(4.0, ["warning"]), (0.25, ["warning"]), (1.0, []), (2.5, []), (None, ["note"])],
)
def test_accumulation_is_a_note_until_it_is_replayed(confirmed: float | None, severities: list[str]) -> None:
    assert _severities(AccumulationNotAveraged(passes=4, factor=1.0, confirmed=confirmed)) == severities


@pytest.mark.parametrize(("factor", "found"), [(1.0, True), (0.25, False), (0.0625, True), (0.5, False)])
def test_accumulation_is_read_off_the_factor(factor: float, found: bool) -> None:
    assert bool(AccumulationNotAveraged(passes=4, factor=factor).judge()) is found


@pytest.mark.parametrize(("carried", "severity"), [(65536.0, "warning"), (32768.0, "error"), (None, "error")])
def test_an_older_scale_is_an_error_where_it_has_changed(carried: float | None, severity: str) -> None:
    event = misuse("older", scale=65536.0, carried=carried)
    assert event.code == "AMP005"
    assert _severities(event) == [severity]


def test_a_scale_that_is_not_carried_is_said_of_what_was_divided_by_hand_too() -> None:
    alarm = misuse("plain", scale=65536.0, parameters=6).judge()
    assert alarm is not None
    assert "never" not in alarm.message
    assert "do not divide" in alarm.fix


@pytest.mark.parametrize(("skipped", "severity"), [(1, "note"), (3, "note"), (4, "warning")])
def test_a_settling_scale_is_a_note(skipped: int, severity: str) -> None:
    assert _severities(ScheduleAdvancesOnSkip(skipped=skipped, steps=10)) == [severity]


@pytest.mark.parametrize(
    ("scale", "finite", "found"), [(2.0, None, False), (0.5, None, True), (1024.0, False, True)]
)
def test_a_scale_collapses_below_one_or_with_its_loss(scale: float, finite: bool | None, found: bool) -> None:
    assert bool(ScaleCollapse(scale=scale, skipped=5, loss_finite=finite).judge()) is found


@pytest.mark.parametrize(
    ("dtype", "autocast", "severity"),
    [("float16", True, "error"), ("bfloat16", True, "warning"), ("bfloat16", False, "note")],
)
def test_a_loss_in_half_precision(dtype: str, autocast: bool, severity: str) -> None:
    event = LossInHalfPrecision(operation="Mean", dtype=dtype, autocast=autocast, scale=None)
    assert _severities(event) == [severity]


def test_a_loss_in_half_precision_is_told_in_plain_words() -> None:
    alarm = LossInHalfPrecision(operation="Mean", dtype="float16", autocast=True, scale=65536.0).judge()
    assert alarm.message == "the loss is computed in float16, not in float32 (by Mean)"
    assert alarm.arithmetic == (
        "float16 keeps 11 bits: the loss is rounded by up to 0.05 %",
        "backward() starts from the loss scale, 65536, which is inf in float16: the largest number is 65504",
    )


@pytest.mark.parametrize(
    ("terms", "error", "severities"),
    [(63, None, []), (64, None, ["note"]), (64, 0.005, ["note"]), (64, 0.02, ["warning"])],
)
def test_a_long_sum_in_half_precision(terms: int, error: float | None, severities: list[str]) -> None:
    assert _severities(LowPrecisionGradientSum(dtype="bfloat16", terms=terms, error=error)) == severities


def test_an_optimizer_whose_constants_survive_is_not_accused() -> None:
    fine = OptimizerStateInHalf(dtype="bfloat16", constants={"eps": (1e-8, 1e-8), "beta2": (0.95, 0.949)})
    assert fine.judge() is None


@pytest.mark.parametrize(
    ("error", "code"),
    [("Attempting to unscale FP16 gradients.", "AMP022"), ("unscale_() has already been called", "AMP005")],
)
def test_what_the_scaler_refuses_is_explained(error: str, code: str) -> None:
    event = refused("train.py:3", "step", error, 2, 4)
    assert event is not None
    assert event.code == code
    assert refused("train.py:3", "step", "out of memory", 2, 4) is None
