"""The debugger on an emulated GPU: what needs no values is found there, and nobody is accused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tilefit.precision.rules import all_rules
from tilefit.report.watched import CANNOT

_VALUES = {rule.code for rule in all_rules() if rule.values}


@cache
def _rows() -> list[dict[str, Any]]:
    tests, source = Path(__file__).parent.parent, Path(__file__).parent.parent.parent / "src"
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{tests}"}
    ran = subprocess.run(
        [sys.executable, "-m", "precision.emulated", "protocol"],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_every_loop_that_is_wrong_without_its_values_is_found_at_its_line() -> None:
    wrong = [row for row in _rows() if "code" in row and row["code"] not in _VALUES]
    assert len(wrong) > 20
    for row in wrong:
        found = [line for code, _, line in row.get("alarms", ()) if code == row["code"]]
        assert set(found) & set(row["lines"]), row


def test_no_healthy_loop_is_accused_and_all_run() -> None:
    healthy = [row for row in _rows() if "code" not in row]
    assert len(healthy) > 30
    assert not [row for row in healthy if "raised" in row]
    assert not [row for row in healthy if any(severity != "note" for _, severity, _ in row["alarms"])]


def test_rules_that_need_values_are_said_to_be_unchecked() -> None:
    assert all("AMP026" in row["cannot"] for row in _rows())


_PROGRAM = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 64)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda")
for step in range(20):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(8, 64, device="cuda")).float().square().mean()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()
    scaler.scale(loss).backward()
    UNSCALE
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    torch.save({"model": model.state_dict(), "scaler": scaler.state_dict()}, "best.pt")
model.load_state_dict(torch.load("best.pt")["model"])
print("the end", loss.item())
"""
_CLIPPED = 1 + _PROGRAM.splitlines().index("    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)")


def _watched(folder: Path, *options: str, unscale: str = "pass") -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(_PROGRAM.replace("UNSCALE", unscale))
    command = [sys.executable, "-m", "tilefit", "precision", *options, "train.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=200)


def test_a_program_that_needs_a_gpu_is_run_on_an_emulated_one(tmp_path: Path) -> None:
    ran = _watched(tmp_path)
    assert ran.returncode == 1, ran.stderr
    assert "No GPU here: running it on an emulated one (--gpu h100-sxm)." in ran.stderr
    assert "train.py · 12 steps watched" in ran.stdout
    assert f"AMP001  train.py:{_CLIPPED}  error, 4 times from step 0 on" in ran.stdout
    assert "an emulated NVIDIA H100" in ran.stdout
    assert not (tmp_path / "best.pt").exists()


def test_a_healthy_program_is_not_accused_and_what_it_was_told_is_listed(tmp_path: Path) -> None:
    unscale = "scaler.unscale_(optimizer)"
    ran = _watched(tmp_path, "--gpu", "h200", "--steps", "30", "--output-format", "json", unscale=unscale)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["steps"] == 20
    assert report["findings"] == []
    assert {c["code"] for c in report["checks"] if c["status"] == CANNOT} <= _VALUES
    (told,) = [table for table in report["tables"] if "nobody knows" in table["title"]]
    assert [row[0].rpartition(":")[2] for row in told["rows"]] == [str(len(_PROGRAM.splitlines()))]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--fake-data"], "--fake-data has no effect"),
        (["--gpu", "h1000"], "h1000"),
        (["--gpu", "h200", "--find-non-finite"], "the emulated GPU has no values"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, options: list[str], words: str) -> None:
    ran = _watched(tmp_path, *options)
    assert ran.returncode == 2
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr
