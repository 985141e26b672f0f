"""``tilefit check``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tilefit.capture import child
from tilefit.cli import check
from tilefit.ops import (
    BACKWARD_DATA,
    BACKWARD_WEIGHT,
    FORWARD,
    Gemm,
    Memory,
    Parameter,
    Settings,
    Site,
    Step,
    StepOp,
    TensorRef,
)
from tilefit.options import TargetOptions


def _linear(module: str, rows: int, out_features: int, in_features: int, first_id: int) -> list[StepOp]:
    """The three products of one linear layer."""
    site = Site(module, "model.py:7")
    x = TensorRef(first_id, (rows, in_features), "bf16")
    weight = TensorRef(first_id + 1, (out_features, in_features), "bf16", f"{module}.weight")
    y = TensorRef(first_id + 2, (rows, out_features), "bf16")
    return [
        StepOp(
            Gemm(rows, out_features, in_features, layout="TN"), FORWARD, site, "aten.mm", (x, weight), (y,)
        ),
        StepOp(
            Gemm(rows, in_features, out_features, layout="NN"),
            BACKWARD_DATA,
            site,
            "aten.mm",
            (y, weight),
            (x,),
        ),
        StepOp(
            Gemm(out_features, in_features, rows, layout="NT"),
            BACKWARD_WEIGHT,
            site,
            "aten.mm",
            (y, x),
            (weight,),
        ),
    ]


def _step(features: int) -> Step:
    """A linear layer with so many outputs, on enough rows that the host does not matter."""
    return Step(
        ops=tuple(_linear("net.up", 65536, features, 4096, 1)),
        memory=Memory(parameter_bytes=10**8, gradient_bytes=10**8, saved_bytes=10**9, peak_bytes=2 * 10**9),
        settings=Settings(amp="bf16"),
        batch=8,
        parameters={"net.up.weight": Parameter((features, 4096), "bf16")},
        modules={"net.up": "Linear"},
        model="net",
    )


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, TargetOptions, float]]:
    """Capture is replaced by a step with an odd number of features; what it was asked for is kept."""
    calls: list[tuple[str, TargetOptions, float]] = []

    def capture(target: str, options: TargetOptions, timeout_s: float, *, fresh: bool, **_: object) -> Step:
        calls.append((target, options, timeout_s))
        return _step(4096 if target == "healthy.net:build" else 4095)

    monkeypatch.setattr(child, "capture_in_child", capture)
    return calls


def test_findings_are_exit_code_1_and_nothing_is_0(tilefit, captured) -> None:
    found = tilefit("check", "odd.net:build", "--gpu", "h200")
    assert found.code == 1
    assert "ALN001" in found.out
    assert found.err == ""
    nothing = tilefit("check", "healthy.net:build", "--gpu", "h200")
    assert (nothing.code, nothing.err) == (0, "")
    assert "Nothing worth changing." in nothing.out


def test_output_to_a_pipe_is_plain(tilefit, captured) -> None:
    assert "\x1b" not in tilefit("check", "odd.net:build", "--gpu", "h200").out


def test_options_reach_the_capture(tilefit, captured) -> None:
    tilefit(
        *(
            "check",
            "m.net:f",
            "--gpu",
            "h200",
            "--input",
            "x: fp32[2,3]",
            "--input",
            "y: int64[2]",
            "--batch",
            "4",
        ),
        *("--seq", "128", "--image-size", "96", "--amp", "fp16", "--tf32", "--optimizer", "sgd"),
        *("--fused-optimizer", "--channels-last", "--compile", "--on-cpu", "--timeout", "7"),
    )
    assert captured == [
        (
            "m.net:f",
            TargetOptions(
                input=("x: fp32[2,3]", "y: int64[2]"),
                batch=4,
                seq=128,
                image_size=96,
                amp="fp16",
                tf32=True,
                optimizer="sgd",
                fused_optimizer=True,
                channels_last=True,
                compile=True,
                on_cpu=True,
            ),
            7.0,
        )
    ]
    tilefit("check", "m.net:build", "--gpu", "h200", "--infer")
    assert captured[1][1] == TargetOptions(train=False)


@pytest.mark.parametrize("verb", ["check", "fix", "sweep", "profile", "curve"])
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--infer", "--optimizer", "sgd"], "--optimizer has no effect: --infer runs no optimizer"),
        (["--infer", "--fused-optimizer"], "--fused-optimizer has no effect: --infer runs no optimizer"),
        (["--optimizer", "none", "--fused-optimizer"], "--fused-optimizer has no effect: --optimizer none"),
    ],
)
def test_an_optimizer_is_not_described_where_none_runs(
    tilefit, captured, verb: str, options: list[str], why: str
) -> None:
    over = {"sweep": ["--over", "batch=1,2"], "curve": ["--over", "batch"]}.get(verb, [])
    ran = tilefit(verb, "m.net:f", "--gpu", "h200", *over, *options)
    assert (ran.code, ran.out, captured) == (2, "", [])
    assert ran.err.startswith(f"error: {why}")


def test_a_forward_pass_may_be_said_to_have_no_optimizer(tilefit, captured) -> None:
    assert tilefit("check", "m.net:build", "--gpu", "h200", "--infer", "--optimizer", "none").err == ""
    assert captured[0][1] == TargetOptions(train=False, optimizer="none")


def test_a_step_of_very_many_operations_is_said_to_take_long(
    tilefit, captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilefit.cli.check._MANY_OPS", 3)
    assert tilefit("check", "m.net:build", "--gpu", "h200").err == ""  # it has three
    monkeypatch.setattr("tilefit.cli.check._MANY_OPS", 2)
    assert "the step has 3 operations" in tilefit("check", "m.net:build", "--gpu", "h200").err


def test_defaults_are_a_training_step_as_pytorch_runs_it(tilefit, captured) -> None:
    tilefit("check", "m.net:build", "--gpu", "h200")
    assert captured[0][1] == TargetOptions()


def test_rules_are_selected_and_ignored(tilefit, captured) -> None:
    assert tilefit("check", "odd.net:build", "--gpu", "h200", "--ignore", "ALN,QNT,LAY").code == 0
    assert tilefit("check", "odd.net:build", "--gpu", "h200", "--select", "ALN001").code == 1
    assert tilefit("check", "odd.net:build", "--gpu", "h200", "--select", "RNN").code == 0


def test_gains_too_small_to_care_about_are_left_out(tilefit, captured) -> None:
    assert tilefit("check", "odd.net:build", "--gpu", "h200", "--min-gain", "1").code == 0


def test_the_project_s_configuration_holds_and_options_go_before_it(
    tilefit, captured, tmp_path: Path
) -> None:
    config = tmp_path / "pyproject.toml"
    config.write_text('[tool.tilefit]\ngpu = "h200"\nselect = ["RNN"]\n')
    assert tilefit("check", "odd.net:build").code == 0
    assert tilefit("check", "odd.net:build", "--select", "ALN").code == 1
    config.write_text(
        '[tool.tilefit]\ngpu = "h200"\n[tool.tilefit.per-module-ignores]\n"net.*" = ["ALN", "QNT", "LAY"]\n'
    )
    assert tilefit("check", "odd.net:build").code == 0
    config.write_text("[tool.tilefit]\ngpus = 1")
    ran = tilefit("check", "odd.net:build")
    assert ran.code == 2
    assert "Did you mean gpu?" in ran.err


@pytest.mark.parametrize("options", [["--gpu", "nope"], ["--gpu", "h200", "--select", "XXX"]])
def test_what_is_wrong_without_the_model_is_found_before_it_is_loaded(tilefit, captured, options) -> None:
    assert tilefit("check", "m.net:build", *options).code == 2
    assert not captured


def test_json_is_data_on_stdout(tilefit, captured) -> None:
    ran = tilefit("check", "odd.net:build", "--gpu", "h200", "--output-format", "json", "--ops")
    data = json.loads(ran.out)
    assert data["gpu"] == "h200"
    assert len(data["ops"]) == 3
    assert ran.err == ""


def test_concise_names_file_and_line(tilefit, captured) -> None:
    ran = tilefit("check", "odd.net:build", "--gpu", "h200", "--output-format", "concise", "--select", "ALN")
    assert ran.out.startswith("model.py:7: ALN001 ")


def test_several_gpus_are_compared(tilefit, captured) -> None:
    ran = tilefit("check", "odd.net:build", "--gpu", "h200", "--gpu", "l4")
    assert "on 2 GPUs" in ran.out
    data = json.loads(
        tilefit("check", "odd.net:build", "--gpu", "h200", "--gpu", "l4", "--output-format", "json").out
    )
    assert [report["gpu"] for report in data["reports"]] == ["h200", "l4"]


def test_a_gpu_named_twice_counts_once(tilefit, captured) -> None:
    assert "on NVIDIA H200" in tilefit("check", "odd.net:build", "--gpu", "h200", "--gpu", "H200").out


def test_a_report_goes_to_a_file(tilefit, captured, tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    ran = tilefit(
        "check", "odd.net:build", "--gpu", "h200", "--output-format", "markdown", "--output-file", str(path)
    )
    assert (ran.code, ran.out) == (1, "")
    assert path.read_text().startswith("# net")


def test_a_file_that_cannot_be_written_is_an_error(tilefit, captured, tmp_path: Path) -> None:
    ran = tilefit(
        "check", "odd.net:build", "--gpu", "h200", "--output-file", str(tmp_path / "no" / "report.txt")
    )
    assert ran.code == 2
    assert "report.txt: cannot be written" in ran.err


def test_a_model_file_end_to_end(tilefit, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(4096, 4095), torch.empty(8192, 4096)\n"
    )
    ran = tilefit("check", "model.py:build", "--gpu", "h200", "--amp", "bf16", "--select", "ALN")
    assert all(line.endswith("…") for line in ran.err.splitlines())  # progress, on a slow machine
    assert ran.code == 1
    assert "ALN001" in ran.out


def test_a_model_file_that_fails_is_one_message(tilefit, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def build():\n    raise RuntimeError('no such luck')\n")
    ran = tilefit("check", "model.py:build", "--gpu", "h200")
    assert ran.code == 2
    assert "no such luck" in ran.err
    assert "model.py" in ran.err
    assert "Traceback" not in ran.err


def test_several_targets_in_one_call(tilefit, tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(
        "from torch import nn, randn\n"
        "def a(): return nn.Linear(4096, 4095), randn(8192, 4096)\n"
        "def b(): return nn.Linear(4096, 4096), randn(8192, 4096)\n"
    )
    options = ("--gpu", "h200", "--amp", "bf16", "--select", "ALN", "--output-format", "concise")
    ran = tilefit("check", "two.py:b", "two.py:a", *options)
    assert (ran.code, ran.out.count("ALN001")) == (1, 1)
    assert tilefit("check", "two.py:b", *options).code == 0
    assert "several targets" in tilefit("check", "two.py:a", "two.py:b", "--output-file", "x.html").err
    assert "cannot read the target 'two'" in tilefit("check", "two.py:a", "two").err


def test_a_change_is_checked_again(tilefit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "net.py"
    text = "from torch import nn, randn\ndef build(): return nn.Linear(4096, 4095), randn(8192, 4096)\n"
    file.write_text(text)
    edits = iter([text.replace("4095", "4096"), "def build(: pass\n"])

    def edit(seconds: float) -> None:
        new = next(edits, None)
        if new is None:
            raise KeyboardInterrupt
        file.write_text(new)
        os.utime(file, ns=(0, len(new)))

    monkeypatch.setattr(check, "sleep", edit)
    ran = tilefit(
        *("check", "net.py:build", "--gpu", "h200", "--amp", "bf16", "--select", "ALN"),
        *("--output-format", "concise", "--watch"),
    )
    assert ran.code == 130
    assert ran.out.count("ALN001") == 1  # then it was mended, and then it was no Python
    assert "net.py:1" in ran.err
    assert ran.err.count("waiting for a change") == 3
