"""The rules as documentation, and what each says about an event."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from tilefit.precision.events import (
    Accumulated,
    Event,
    HalfState,
    HalfSum,
    LossInHalf,
    Movement,
    OperationChecked,
    ScaleHistory,
    SchedulerStepped,
    WrongDivision,
)
from tilefit.precision.rules import PrecisionRule, all_rules
from tilefit.rules.finding import Alarm
from tilefit.rules.registry import pick


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


def _alarms(code: str, event: Event) -> list[Alarm]:
    return list(pick(code, all_rules()).judge(event))


def _severities(code: str, event: Event) -> list[str]:
    return [alarm.severity for alarm in _alarms(code, event)]


def _operation(**values: float) -> OperationChecked:
    figures = {"overflowed": 0.0, "vanished": 0.0, "error_ulp": 0.0, "largest": 1.0} | values
    return OperationChecked(operation="pow", dtype="float16", **figures)


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
def test_an_operation_is_judged_by_its_error(event: OperationChecked, found: bool) -> None:
    assert bool(_alarms("AMP012", event)) is found


@pytest.mark.parametrize(("projection", "found"), [(0.0, True), (0.49, True), (0.5, False), (0.997, False)])
@pytest.mark.parametrize(("code", "parameter"), [("AMP013", True), ("AMP015", False)])
def test_lost_movement(code: str, parameter: bool, projection: float, found: bool) -> None:
    event = Movement(dtype="bfloat16", steps=32, projection=projection, parameter=parameter, values=100)
    assert bool(_alarms(code, event)) is found
    other = "AMP015" if parameter else "AMP013"
    assert not _alarms(other, event)


@pytest.mark.parametrize(
    ("confirmed", "severities"),
    [(4.0, ["warning"]), (0.25, ["warning"]), (1.0, []), (2.5, []), (None, ["note"])],
)
def test_accumulation_is_a_note_until_it_is_replayed(confirmed: float | None, severities: list[str]) -> None:
    assert _severities("AMP018", Accumulated(passes=4, factor=1.0, confirmed=confirmed)) == severities


@pytest.mark.parametrize(("factor", "found"), [(1.0, True), (0.25, False), (0.0625, True), (0.5, False)])
def test_accumulation_is_read_off_the_factor(factor: float, found: bool) -> None:
    assert bool(_alarms("AMP018", Accumulated(passes=4, factor=factor))) is found


@pytest.mark.parametrize(("carried", "severity"), [(65536.0, "warning"), (32768.0, "error"), (None, "error")])
def test_an_older_scale_is_an_error_where_it_has_changed(carried: float | None, severity: str) -> None:
    event = WrongDivision(kind="older", scale=65536.0, carried=carried)
    assert _severities("AMP005", event) == [severity]


@pytest.mark.parametrize(("skipped", "severity"), [(1, "note"), (3, "note"), (4, "warning")])
def test_a_settling_scale_is_a_note(skipped: int, severity: str) -> None:
    assert _severities("AMP021", SchedulerStepped(skipped=skipped, steps=10)) == [severity]


@pytest.mark.parametrize(
    ("scale", "finite", "found"), [(2.0, None, False), (0.5, None, True), (1024.0, False, True)]
)
def test_a_scale_collapses_below_one_or_with_its_loss(scale: float, finite: bool | None, found: bool) -> None:
    assert bool(_alarms("AMP029", ScaleHistory(scale=scale, skipped=5, loss_finite=finite))) is found


@pytest.mark.parametrize(
    ("dtype", "autocast", "severity"),
    [("float16", True, "error"), ("bfloat16", True, "warning"), ("bfloat16", False, "note")],
)
def test_a_loss_in_half_precision(dtype: str, autocast: bool, severity: str) -> None:
    event = LossInHalf(operation="Mean", dtype=dtype, autocast=autocast, scale=None)
    assert _severities("AMP011", event) == [severity]


def test_a_loss_in_half_precision_is_told_in_plain_words() -> None:
    (alarm,) = _alarms("AMP011", LossInHalf(operation="Mean", dtype="float16", autocast=True, scale=65536.0))
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
    assert _severities("AMP024", HalfSum(dtype="bfloat16", terms=terms, error=error)) == severities


def test_an_optimizer_whose_constants_survive_is_not_accused() -> None:
    fine = HalfState(
        dtype="bfloat16",
        eps=1e-8,
        eps_rounded=1e-8,
        beta2=0.95,
        beta2_rounded=0.949,
        decay=None,
        decay_rounded=None,
    )
    assert _alarms("AMP014", fine) == []
