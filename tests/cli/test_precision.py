"""``tilefit precision``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_LOOP = """
import sys
import torch
from torch.nn.utils import clip_grad_norm_

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
print("arguments", sys.argv[1:])
for step in range(20):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = torch.nn.functional.mse_loss(model(torch.randn(8, 4)).float(), torch.randn(8, 4))
    scaler.scale(loss).backward()
    if "--unscale" in sys.argv:
        scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
print("the end")
"""
_LINE = 1 + _LOOP.splitlines().index("    clip_grad_norm_(model.parameters(), 1.0)")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(_LOOP)
    return path


def test_a_mistake_is_found_with_its_line(tilefit, script: Path) -> None:
    ran = tilefit("precision", str(script))
    assert ran.code == 1
    assert f"AMP001  train.py:{_LINE}  error, 20 times from step 0 on" in ran.out
    assert "effective limit 1 / 65536 = 1.5e-05" in ran.out
    assert "unscale_" in ran.out
    assert "arguments []" in ran.err
    assert "the end" in ran.err


def test_an_option_behind_the_script_is_the_scripts_and_that_is_said(tilefit, script: Path) -> None:
    ran = tilefit("precision", "train.py", "--steps=2", "--unscale")
    assert "--steps went to train.py" in ran.err
    assert "--unscale went" not in ran.err
    assert "arguments ['--steps=2', '--unscale']" in ran.err


def test_arguments_of_the_script_may_stand_behind_dashes(tilefit, script: Path) -> None:
    ran = tilefit("precision", "train.py", "--", "--steps=2", "--unscale")
    assert "went to train.py" not in ran.err
    assert "arguments ['--steps=2', '--unscale']" in ran.err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--no-numerics", "--every", "5"], "--every has no effect: --no-numerics"),
        (["--no-numerics", "--find-non-finite"], "--find-non-finite has no effect: --no-numerics"),
        (["--find-non-finite", "--every", "5"], "--every has no effect: --find-non-finite"),
    ],
)
def test_options_without_effect_are_refused(tilefit, script: Path, options: list[str], why: str) -> None:
    ran = tilefit("precision", *options, str(script))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {why}")


def test_a_healthy_script_is_nothing_wrong(tilefit, script: Path) -> None:
    ran = tilefit("precision", "--steps", "5", str(script), "--unscale", "--steps", "7")
    assert ran.code == 0
    assert "5 steps watched" in ran.out
    assert "Nothing wrong." in ran.out
    assert "arguments ['--unscale', '--steps', '7']" in ran.err
    assert "the end" not in ran.err


def test_formats(tilefit, script: Path, tmp_path: Path) -> None:
    data = json.loads(tilefit("precision", "--steps", "3", "--output-format", "json", str(script)).out)
    assert (data["schema_version"], data["kind"], data["steps"]) == (1, "watched", 3)
    (finding,) = data["findings"]
    assert (finding["code"], finding["severity"], finding["steps"]) == ("AMP001", "error", 3)
    concise = tilefit("precision", "--steps", "3", "--output-format", "concise", str(script)).out
    assert concise.startswith(f"{script.name}:{_LINE}: AMP001 clipped at 1 ")
    markdown = tmp_path / "report.md"
    ran = tilefit("precision", "--output-format", "markdown", "--output-file", str(markdown), str(script))
    assert (ran.code, ran.out) == (1, "")
    assert "**AMP001**" in markdown.read_text()


@pytest.mark.parametrize(("name", "why"), [("no/run.json", "there is no folder"), (".", "it is a folder")])
def test_a_file_that_could_not_be_written_is_refused_before_the_script_runs(
    tilefit, script: Path, tmp_path: Path, name: str, why: str
) -> None:
    script.write_text("open('ran', 'w')\n")
    ran = tilefit("precision", "--output-file", str(tmp_path / name), str(script))
    assert ran.code == 2
    assert f"cannot be written: {why}" in ran.err
    assert not Path("ran").exists()


def test_rules_are_selected(tilefit, script: Path) -> None:
    assert tilefit("precision", "--ignore", "AMP001", str(script)).code == 0
    ran = tilefit("precision", "--ignore", "AMQ", str(script))
    assert ran.code == 2
    assert "Did you mean AMP?" in ran.err


def test_a_script_that_fails_is_reported_with_its_line(tilefit, script: Path) -> None:
    script.write_text(_LOOP.replace('print("the end")', "1 / 0"))
    ran = tilefit("precision", str(script))
    assert ran.code == 2
    assert "AMP001" in ran.out
    assert f"train.py:{len(_LOOP.splitlines())}: ZeroDivisionError" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys\nsys.exit(3)\n", "exit code 3"),
        ("import sys\nsys.exit('where is the data?')\n", "the script left, saying: where is the data?"),
        ("print('no training')\n", "no optimizer made a step"),
    ],
)
def test_a_script_without_training_could_not_be_watched(
    tilefit, script: Path, text: str, message: str
) -> None:
    script.write_text(text)
    ran = tilefit("precision", str(script))
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


def test_what_was_found_before_an_interruption_is_shown(tilefit, script: Path) -> None:
    script.write_text(_LOOP.replace('print("the end")', "raise KeyboardInterrupt"))
    ran = tilefit("precision", str(script))
    assert ran.code == 130
    assert f"AMP001  train.py:{_LINE}  error, 20 times from step 0 on" in ran.out


def test_an_interruption_before_the_first_step_shows_nothing(tilefit, script: Path) -> None:
    script.write_text("raise KeyboardInterrupt\n")
    ran = tilefit("precision", str(script))
    assert (ran.code, ran.out, ran.err) == (130, "", "")


def test_a_script_that_imports_from_its_package_runs_as_a_part_of_it(tilefit, script: Path) -> None:
    folder = script.parent / "a_package_to_watch"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "sizes.py").write_text("BATCH = 8\n")
    (folder / "train.py").write_text(f"from .sizes import BATCH\n{_LOOP}".replace("randn(8", "randn(BATCH"))
    ran = tilefit("precision", "--steps", "3", str(folder / "train.py"), "--unscale")
    assert ran.code == 0
    assert "arguments ['--unscale']" in ran.err


def test_a_script_that_is_not_there(tilefit) -> None:
    ran = tilefit("precision", "nope.py")
    assert ran.code == 2
    assert "nope.py: there is no such file" in ran.err


def test_a_rule_s_page(tilefit) -> None:
    ran = tilefit("rule", "amp001")
    assert ran.code == 0
    assert ran.out.startswith("# AMP001: gradients are clipped before they are unscaled")
    assert "Wrong:" in ran.out


_NOTE = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    for _ in range(4):
        torch.nn.functional.mse_loss(model(torch.randn(8, 4)), torch.randn(8, 4)).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--strict"], 1)])
def test_notes_alone_are_no_failure_unless_one_is_strict(
    tilefit, script: Path, options: list[str], code: int
) -> None:
    script.write_text(_NOTE)
    ran = tilefit("precision", *options, str(script))
    assert "AMP018" in ran.out
    assert ran.code == code


def test_under_torchrun_findings_are_no_crash(tilefit, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    ran = tilefit("precision", "--steps", "3", str(script))
    assert "AMP001" in ran.out
    assert ran.code == 0


def test_a_script_that_catches_everything_is_ended_all_the_same(script: Path) -> None:
    loop = _LOOP.replace("for step in range(20):", "def train():").replace('print("the end")', "")
    script.write_text(f"{loop}\nwhile True:\n    try:\n        train()\n    except:\n        pass\n")
    command = [sys.executable, "-m", "tilefit", "precision", "--steps", "3", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 1
    assert "3 steps watched" in ran.stdout
    assert "AMP001" in ran.stdout


def test_what_became_of_each_rule_is_listed(tilefit, script: Path) -> None:
    data = json.loads(tilefit("precision", "--steps", "3", "--output-format", "json", str(script)).out)
    checks = {check["code"]: check for check in data["checks"]}
    assert len(checks) == 31
    assert checks["AMP001"]["status"] == "checked"
    assert checks["AMP013"] == {
        "code": "AMP013",
        "status": "not applicable",
        "why": "the run had no half-precision weights",
    }
    books = json.loads(tilefit("precision", "--no-numerics", "--output-format", "json", str(script)).out)
    checks = {check["code"]: check for check in books["checks"]}
    assert checks["AMP012"]["status"] == "could not be checked"
    assert checks["AMP012"]["why"] == "close looks are switched off"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the scaler is on where there is a GPU")
def test_a_scaler_that_is_off_for_want_of_a_gpu_is_no_mistake(tilefit, tmp_path: Path) -> None:
    path = tmp_path / "either.py"
    text = _LOOP.replace('GradScaler("cpu")', 'GradScaler("cuda")')
    path.write_text(text)
    ran = tilefit("precision", str(path))
    assert ran.code == 0
    assert "Nothing wrong" in ran.out
    assert "which is off without CUDA: --gpu NAME" in " ".join(ran.out.split())
