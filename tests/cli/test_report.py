"""``tilefit report``, and the formats that every command with a report has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from builders import StepBuilder
from tilefit.capture import child
from tilefit.cli.report_output import Format
from tilefit.report import FORMATS, load

_CHECK = ("check", "odd.net:build", "--gpu", "h200", "--amp", "bf16")


@pytest.fixture
def run_json(tilefit, monkeypatch: pytest.MonkeyPatch) -> str:
    """The report of a step with an odd size, written by ``check``; capture is replaced."""
    builder = StepBuilder()
    builder.linear("net.up", 65536, 4096, 4095)
    step = builder.step()
    monkeypatch.setattr(child, "capture_in_child", lambda *_, **__: step)
    assert tilefit(*_CHECK, "--output-format", "json", "--output-file", "run.json").code == 1
    return "run.json"


def test_the_options_offer_every_format() -> None:
    assert set(get_args(Format)) == set(FORMATS)


def test_a_stored_report_is_shown_as_check_would_have(tilefit, run_json: str) -> None:
    for options in (["--all", "--ops"], *(["--output-format", name] for name in FORMATS)):
        now, later = tilefit(*_CHECK, *options), tilefit("report", run_json, *options)
        assert later.out == now.out != ""
        # Showing is no finding: the exit code is that of a command that worked.
        assert (now.code, later.code, later.err) == (1, 0, "")


def test_it_goes_to_a_file(tilefit, run_json: str, tmp_path: Path) -> None:
    ran = tilefit("report", run_json, "--output-format", "sarif", "--output-file", "run.sarif")
    assert (ran.code, ran.out) == (0, "")
    assert json.loads((tmp_path / "run.sarif").read_text())["version"] == "2.1.0"


@pytest.mark.parametrize(
    ("file", "form"),
    [
        ("a.html", "html"),
        ("a.JSON", "json"),
        ("a.md", "markdown"),
        ("a.sarif", "sarif"),
        ("a.xml", "junit"),
        ("a.txt", "text"),
    ],
)
def test_the_ending_of_the_file_says_the_format(
    tilefit, run_json: str, tmp_path: Path, file: str, form: str
) -> None:
    assert tilefit("report", run_json, "--output-file", file).code == 0
    assert (tmp_path / file).read_text() == tilefit("report", run_json, "--output-format", form).out
    # What is asked for goes before the ending.
    tilefit("report", run_json, "--output-file", file, "--output-format", "concise")
    assert (tmp_path / file).read_text() == tilefit("report", run_json, "--output-format", "concise").out


def test_what_a_later_version_wrote_is_shown_with_a_note(tilefit, run_json: str, tmp_path: Path) -> None:
    data = json.loads((tmp_path / run_json).read_text())
    (tmp_path / "later.json").write_text(json.dumps({**data, "colour": "red"}))
    ran = tilefit("report", "later.json")
    assert ran.code == 0
    assert ran.out == tilefit("report", run_json).out
    assert ran.err.startswith("note: later.json: ")
    assert ran.err.endswith("left out: colour\n")
    (tmp_path / "later.json").write_text(json.dumps({**data, "schema_version": 99}))
    ran = tilefit("report", "later.json")
    assert (ran.code, ran.out) == (2, "")
    assert "version 99" in ran.err
    assert "Upgrade tilefit" in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope.json"], "nope.json: cannot be read"),
        (["text.json"], "text.json: is not JSON"),
        (["page.html"], "Name a file that tilefit check, profile or precision wrote"),
        (["trace.json"], "tilefit profile trace.json"),
        (["run.json", "--output-format", "yaml"], "'--output-format': 'yaml' is not one of 'text', "),
    ],
)
def test_what_cannot_be_shown_is_one_message(
    tilefit, run_json: str, tmp_path: Path, arguments: Sequence[str], message: str
) -> None:
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "page.html").write_text("<html></html>")
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    ran = tilefit("report", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


def test_fix_shows_the_findings_in_the_formats_of_a_report(tilefit, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(4096, 4095), torch.empty(8192, 4096)\n"
    )
    options = ("--gpu", "h200", "--amp", "bf16", "--select", "ALN", "--no-verify")
    ran = tilefit("fix", "model.py:build", *options, "--output-format", "concise")
    assert ran.out.startswith("model.py:3: ALN001 ")


@pytest.mark.parametrize(("name", "start"), [("github", "::error file="), ("junit", "<?xml"), ("sarif", "{")])
def test_precision_has_the_same_formats(tilefit, tmp_path: Path, name: str, start: str) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "scaler = torch.amp.GradScaler('cpu')\n"
        "for step in range(3):\n"
        "    optimizer.zero_grad()\n"
        "    scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()\n"
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "    scaler.step(optimizer)\n"
        "    scaler.update()\n"
    )
    ran = tilefit("precision", "--output-format", name, "train.py")
    assert ran.code == 1
    assert ran.out.startswith(start)
    assert "AMP001" in ran.out
    if name == "sarif":
        (rule,) = json.loads(ran.out)["runs"][0]["tool"]["driver"]["rules"]
        assert "Wrong:" in rule["help"]["text"]
    stored = tilefit("precision", "--output-format", "json", "--output-file", "p.json", "train.py")
    assert stored.code == 1
    assert tilefit("report", "p.json", "--output-format", name).out == ran.out


def test_the_json_holds_the_operations(run_json: str, tmp_path: Path) -> None:
    (report,) = load(tmp_path / run_json).reports
    assert len(report.ops) == report.step.op_count
