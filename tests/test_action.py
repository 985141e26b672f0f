"""tilefit in other people's tools: the step for GitHub, the hook of pre-commit, the problem matcher."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tilefit.cli.main import VERBS
from tilefit.report import Report, render

ROOT = Path(__file__).resolve().parents[1]
_NET = "from torch import nn, randn\ndef build():\n    return nn.Linear(4096, 4095), randn(8192, 4096)\n"


@pytest.fixture
def runner(tmp_path: Path) -> dict[str, str]:
    """What a runner of GitHub sets, and a tilefit of these sources on its path."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tilefit").write_text(f'#!/bin/sh\nexec {sys.executable} -m tilefit "$@"\n')
    (tmp_path / "bin" / "tilefit").chmod(0o755)
    (tmp_path / "net.py").write_text(_NET)
    return {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GPU": "h200",
        "MIN_GAIN": "0.05",
        "OPTIONS": "--amp bf16 --select ALN",
    }


def _run(runner: dict[str, str], target: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "action" / "check.sh")],
        cwd=runner["RUNNER_TEMP"],
        env={**runner, "TARGET": target},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_step_annotates_and_tells_what_it_found(runner: dict[str, str]) -> None:
    ran = _run(runner, "net.py:build")
    assert ran.returncode == 0, ran.stderr
    assert "::warning file=net.py,line=3,title=ALN001" in ran.stdout
    output = dict(line.split("=", 1) for line in Path(runner["GITHUB_OUTPUT"]).read_text().splitlines())
    assert output["findings"] == "1"
    folder = Path(output["folder"])
    assert json.loads((folder / "1.sarif").read_text())["version"] == "2.1.0"
    assert (folder / "comment.md").read_text() == Path(runner["GITHUB_STEP_SUMMARY"]).read_text()
    assert "ALN001" in (folder / "comment.md").read_text()
    # A target is no code: what stands in it is not run.
    refused = _run(runner, "$(touch${IFS}evil).py:build")
    assert refused.returncode != 0
    assert not (Path(runner["RUNNER_TEMP"]) / "evil").exists()


def test_the_step_hands_over_what_its_script_reads() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    steps = action["runs"]["steps"]
    read = set(re.findall(r"\$\{?([A-Z_]+)", (ROOT / "action" / "check.sh").read_text()))
    check = next(step for step in steps if step.get("id") == "check")
    assert read - {"GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "RUNNER_TEMP"} == check["env"].keys()
    used = set(re.findall(r"inputs\.([\w-]+)", json.dumps(steps)))
    assert used == action["inputs"].keys()
    # What a pull request may set never stands in a script itself.
    assert not any("${{" in step.get("run", "") for step in steps)


def test_the_hook_runs_a_command_that_there_is() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    name, verb, *options = hook["entry"].split()
    assert name == "tilefit"
    assert verb in VERBS
    assert options == ["--output-format", "concise"]


def test_the_matcher_reads_concise_lines() -> None:
    matcher = json.loads((ROOT / "action" / "matcher.json").read_text())["problemMatcher"][0]["pattern"][0]
    line = "src/net.py:41: ALN002 The vocabulary is odd: 3 products [saves 8.00 ms (20.0 %)]"
    found = re.match(matcher["regexp"], line)
    assert found
    assert [found[matcher[name]] for name in ("file", "line", "code")] == ["src/net.py", "41", "ALN002"]


def test_concise_lines_of_a_report_fit_it(first_report: Report) -> None:
    pattern = json.loads((ROOT / "action" / "matcher.json").read_text())["problemMatcher"][0]["pattern"][0]
    lines = render(first_report, "concise").splitlines()
    assert lines
    assert all(re.match(pattern["regexp"], line) for line in lines)


@pytest.fixture
def first_report() -> Report:
    """A stored one, whose findings all have a line."""
    from tilefit.report import load

    report = load(ROOT / "tests" / "report" / "data" / "first-report.json", note=lambda _: None)
    assert isinstance(report, Report)
    return report
