"""The assertion that a step wastes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tilefit
from tilefit.errors import TilefitError, UsageError
from tilefit.testing import WasteError, assert_no_waste, share

INPUTS = torch.empty(8192, 4096, device="meta")
SIZES = {"gpu": "h200", "amp": "bf16", "rules": ["ALN", "QNT"]}


def _linear(features: int) -> nn.Module:
    return nn.Linear(4096, features, device="meta")


def test_a_good_size_passes() -> None:
    assert_no_waste(_linear(4096), INPUTS, **SIZES)


def test_a_size_that_nobody_meant_fails_with_what_to_do() -> None:
    with pytest.raises(WasteError) as failed:
        assert_no_waste(_linear(4095), INPUTS, name="head", max_waste="5%", **SIZES)
    first, *rest = str(failed.value).splitlines()
    assert first.startswith("head · training step on NVIDIA H200 SXM 141GB: safe changes would save ")
    assert first.endswith(", at most 5.0 % may be wasted")
    assert "head: ALN001 4095 features are no multiple of 8" in rest[0]
    assert "4095 -> 4096" in rest[1]
    assert rest[-1] == "  tilefit rule ALN001 explains the first."
    assert failed.value.report.waste > 0.05
    # It is an assertion like any other.
    assert isinstance(failed.value, AssertionError)


def test_waste_below_the_limit_passes() -> None:
    report = tilefit.check(_linear(4095), INPUTS, gpu="h200", amp="bf16", select=SIZES["rules"])
    assert isinstance(report, tilefit.Report)
    assert 0.05 < report.waste < 0.99
    assert_no_waste(_linear(4095), INPUTS, max_waste=report.waste, **SIZES)
    with pytest.raises(WasteError):
        assert_no_waste(_linear(4095), INPUTS, max_waste=report.waste - 1e-6, **SIZES)


def test_only_safe_findings_are_waste() -> None:
    # fp32 products without TF32: a finding of PRC, but one that changes the rounding.
    report = tilefit.check(_linear(4096), INPUTS, gpu="h200", select=["PRC"])
    assert isinstance(report, tilefit.Report)
    assert {finding.safety for finding in report.findings} == {"unsafe"}
    assert report.waste == 0.0
    assert_no_waste(_linear(4096), INPUTS, gpu="h200", rules=["PRC"], max_waste=0)


def test_every_gpu_must_pass() -> None:
    with pytest.raises(WasteError, match="on NVIDIA A100"):
        assert_no_waste(_linear(4095), INPUTS, **{**SIZES, "gpu": ["t4", "a100-80gb"]}, max_waste=0.45)


def test_what_does_not_fit_fails_whatever_may_be_wasted() -> None:
    model = nn.Linear(300_000, 300_000, device="meta")
    with pytest.raises(WasteError, match="BAT002"):
        assert_no_waste(model, torch.empty(8, 300_000, device="meta"), gpu="t4", max_waste=1.0)


def test_a_whole_training_step() -> None:
    with torch.device("meta"):
        model = _linear(4095)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).sum()
        loss.backward()
        optimizer.step()

    with pytest.raises(WasteError, match="ALN001"):
        assert_no_waste(step, (INPUTS,), gpu="h200", rules=["ALN"])


@pytest.mark.parametrize(
    ("value", "expected"), [("5%", 0.05), (" 12.5 % ", 0.125), (0.05, 0.05), (0, 0.0), ("1", 1.0)]
)
def test_a_share_is_written_in_either_way(value: Any, expected: float) -> None:
    assert share(value) == pytest.approx(expected)


@pytest.mark.parametrize("value", ["five", "", "%", -0.1, 5, "101%", "nan", None, [0.1]])
def test_what_is_no_share_is_an_error(value: Any) -> None:
    with pytest.raises(UsageError, match="max_waste is"):
        share(value)


def test_an_unknown_rule_or_gpu_is_an_error_not_a_failure() -> None:
    for options in ({"gpu": "h200", "rules": ["XYZ"]}, {"gpu": "h201"}):
        with pytest.raises(TilefitError) as error:
            assert_no_waste(_linear(8), INPUTS, **options)
        assert not isinstance(error.value, AssertionError)
