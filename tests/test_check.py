"""The whole check, from Python."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch

import tilefit
from small_calibration import made
from tilefit.cost.calibration import write
from tilefit.errors import UsageError
from tilefit.report import FORMATS, render


def _model(features: int) -> torch.nn.Module:
    return torch.nn.Linear(4096, features, bias=False)


def test_a_misaligned_layer_is_found_and_its_neighbour_is_healthy() -> None:
    rows = torch.empty(8192, 4096)
    bad = tilefit.check(_model(4095), rows, gpu="h200", amp="bf16", select=["ALN"])
    good = tilefit.check(_model(4096), rows, gpu="h200", amp="bf16", select=["ALN"])
    assert isinstance(bad, tilefit.Report)
    assert isinstance(good, tilefit.Report)
    assert [finding.code for finding in bad.findings] == ["ALN001"]
    assert good.findings == ()
    # What the finding promises is what the healthy layer has.
    assert bad.step.time_s - bad.findings[0].gain_s == pytest.approx(good.step.time_s, rel=0.05)


def test_several_gpus_give_a_comparison() -> None:
    both = tilefit.check(_model(4096), torch.empty(64, 4096), gpu=["h200", "l4"], train=False)
    assert isinstance(both, tilefit.Comparison)
    assert both["l4"].step.time_s > both["h200"].step.time_s


def test_the_model_is_left_as_it_was() -> None:
    model = _model(64).eval()
    before = copy.deepcopy(model.state_dict())
    tilefit.check(model, torch.empty(2, 2, 2, 4096), gpu="h200", channels_last=True)
    assert not model.training
    assert model.weight.device.type == "cpu"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_step_captured_once_is_assessed_on_any_gpu() -> None:
    from tilefit.capture import capture

    step = capture(_model(4096), torch.empty(64, 4096), train=False)
    again = tilefit.Step.from_json(step.to_json())
    assert tilefit.assess(again, "h200").to_json() == tilefit.assess(step, "h200").to_json()


def test_without_a_gpu_one_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilefit.gpus.local", lambda: None)
    with pytest.raises(tilefit.TilefitError, match="no GPU was named"):
        tilefit.check(_model(64), torch.empty(8, 4096))


def test_a_gpu_is_named_by_a_text() -> None:
    for gpu in (0, [0, 1]):
        with pytest.raises(UsageError, match="not by int 0"):
            tilefit.check(torch.nn.Linear(8, 8), torch.empty(4, 8), gpu=gpu)  # type: ignore[arg-type]


def test_at_a_prompt_a_report_is_one_line() -> None:
    step = torch.nn.Linear(1024, 4096), torch.empty(4096, 1024)
    one = tilefit.check(*step, gpu="h200", train=False, select=["PRC001"])
    assert re.fullmatch(r"<Report Linear on h200: [\d.]+ [µm]s, 1 finding>", repr(one))
    both = tilefit.check(*step, gpu=["h200", "l4"], train=False, select=["ALN"])
    assert re.fullmatch(
        r"<Comparison Linear on h200: .*s, 0 findings; Linear on l4: .*s, 0 findings>", repr(both)
    )


def test_the_local_gpu_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilefit.gpus.local", lambda: tilefit.gpus.get("l4"))
    report = tilefit.check(_model(64), torch.empty(8, 4096), train=False)
    assert isinstance(report, tilefit.Report)
    assert report.gpu == "l4"


def test_every_public_name_is_there_and_a_wrong_one_is_not() -> None:
    for name in tilefit.__all__:
        assert getattr(tilefit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'chek'"):
        tilefit.chek  # noqa: B018 - the access is the test


def test_a_compiled_step_is_fused_and_takes_less_time() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.GELU(), torch.nn.LayerNorm(4096))
    rows = torch.empty(32768, 4096)
    eager = tilefit.check(model, rows, gpu="h200", amp="bf16")
    compiled = tilefit.check(model, rows, gpu="h200", amp="bf16", compile=True)
    assert isinstance(eager, tilefit.Report)
    assert isinstance(compiled, tilefit.Report)
    assert compiled.step.op_count < eager.step.op_count
    assert compiled.step.time_s < eager.step.time_s
    # What compiling was said to save is what it saves.
    (promised,) = [f for f in eager.findings if f.code == "NTC001"]
    assert eager.step.time_s - promised.gain_s == pytest.approx(compiled.step.time_s, rel=1e-6)
    assert "NTC001" not in [f.code for f in compiled.findings]


def test_a_profile_from_a_file(tmp_path: Path) -> None:
    a100 = tilefit.gpus.get("a100")
    write(made(a100), tmp_path / "a100.npz")
    model, rows = _model(4096).bfloat16(), torch.empty(8192, 4096, dtype=torch.bfloat16)
    usual = tilefit.check(model, rows, gpu="a100")
    fitted = tilefit.check(model, rows, calibration=tmp_path / "a100.npz")  # of the file's GPU
    assert isinstance(usual, tilefit.Report)
    assert isinstance(fitted, tilefit.Report)
    assert fitted.gpu == a100.name
    assert fitted.step.gpu_time_s > 2 * usual.step.gpu_time_s
    assert fitted.profile == "calibrated on 2026-01-02"
    assert usual.profile.startswith("the NVIDIA H200")
    assert tilefit.check(model, rows, gpu="a100") == usual


def test_a_target_is_named_as_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("from torch import nn, randn\ndef build():\n    return nn.Linear(8, 8), randn(4, 8)\n")
    target = f"{file}:build"
    of_file = tilefit.check(target, gpu="h200", amp=torch.bfloat16)
    of_model = tilefit.check(torch.nn.Linear(8, 8), torch.empty(4, 8), gpu="h200", amp="bf16")
    assert of_file.step.time_s == of_model.step.time_s
    with pytest.raises(tilefit.TilefitError, match="has no 'biuld'"):
        tilefit.check(f"{file}:biuld", gpu="h200")
    with pytest.raises(UsageError, match="its own inputs"):
        tilefit.check(target, torch.empty(4, 8), gpu="h200")  # type: ignore[call-overload]


def test_an_optimizer_that_has_parameters_is_refused() -> None:
    model = _model(64)
    with pytest.raises(UsageError, match="an AdamW has parameters of its own") as error:
        tilefit.check(
            model, torch.empty(8, 4096), gpu="h200", optimizer=torch.optim.AdamW(model.parameters())
        )
    assert "optimizer=lambda parameters" in error.value.hint


@pytest.mark.parametrize("model", [torch.nn.Identity(), torch.nn.Flatten()])
def test_a_model_that_does_nothing_takes_no_time(model: torch.nn.Module) -> None:
    report = tilefit.check(model, torch.empty(4, 2, 2), gpu="h200", train=False)
    assert report.step.time_s == 0
    assert report.findings == ()
    assert "nothing on the GPU" in report.notes[0]
    for name in FORMATS:
        render(report, name, show_all=True, ops=True, prices={"": 2.0})
