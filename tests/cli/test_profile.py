"""``tilefit profile`` on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pretend_gpu import pretend_file
from profiled_net import Net, training_step

#: The ``tilefit`` fixture: runs the command line in this process.
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), foreach=True)
    with torch.profiler.profile(record_shapes=True, with_stack=True) as profiler:
        training_step(model, optimizer)
    profiler.export_chrome_trace(str(folder / "cpu.json"))
    path = folder / "step.json"
    path.write_text(json.dumps(pretend_file(folder / "cpu.json")))
    return path


def test_a_trace_is_imported_and_exported(tilefit: Run, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    run = tilefit("profile", str(trace), "--output-format", "json", "--export", str(out))
    assert run.code in (0, 1), run.err
    report = json.loads(run.out)
    assert report["gpu"] == "h200"
    assert report["measured"]["tensor_core_s"] > 0
    # Without ranges of ours the modules are the frames' classes and numbers.
    assert {row["module"] for row in report["ops"] if row["kind"] == "gemm"} == {
        "Net_0.Linear_0",
        "Net_0.Linear_1",
    }
    assert "ui.perfetto.dev" in run.err
    assert any(event.get("cat") == "tilefit" for event in json.loads(out.read_text())["traceEvents"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none.json"], "No such file"),
        (["none.py"], "there is no such file"),
        (["hf:gpt2", "more"], "unexpected argument 'more'"),
        (["{trace}", "--gpu", "h201"], "h201"),
        (["{trace}", "--select", "XYZ"], "no rule is called 'XYZ'"),
        (["{trace}", "--batch", "4"], "--batch has no effect: a trace tells which steps it is of"),
        (["{trace}", "--steps", "4"], "--steps has no effect"),
        (["{trace}", "--export", "{trace}"], "is the trace itself"),
        (["--compile", "{script}"], "--compile has no effect: a script makes its own steps"),
        (["--gpu", "h201", "{script}"], "unknown GPU 'h201'"),
        (["trace.jsn"], "trace.jsn: neither a model, a script nor a trace"),
    ],
)
def test_what_cannot_run_is_told(tilefit: Run, trace: Path, arguments: list[str], says: str) -> None:
    before = trace.read_bytes()
    script = trace.with_name("train.py")
    script.touch()
    run = tilefit("profile", *(argument.format(trace=trace, script=script) for argument in arguments))
    assert run.code == 2
    assert says in run.err
    assert "bug" not in run.err
    assert trace.read_bytes() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_script_is_not_run_for_nothing(tilefit: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('ran')")
    run = tilefit("profile", "--steps", "2", str(script), "--steps", "mine")
    assert run.code == 2
    assert "no CUDA GPU" in run.err
    assert "ran" not in run.err
