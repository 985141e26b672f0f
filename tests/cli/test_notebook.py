"""The magic of notebooks, in a real shell."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import tilefit
from tilefit.report import Comparison, Report

MODEL = "import torch\nmodel, rows = torch.nn.Linear(4096, 4095), torch.empty(8192, 4096)\n"


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> InteractiveShell:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    made = InteractiveShell()
    assert made.run_cell("%load_ext tilefit").success
    assert made.run_cell(MODEL).success
    return made


def test_names_are_checked_as_python_checks_them(shell: InteractiveShell) -> None:
    report = shell.run_cell("%tilefit model rows --gpu h200 --amp bf16 --select ALN,QNT").result
    names = shell.user_ns
    in_python = tilefit.check(
        names["model"], names["rows"], gpu="h200", amp="bf16", select=["ALN", "QNT"], name=report.model
    )
    assert report == in_python
    assert [finding.code for finding in report.findings] == ["ALN001"]


def test_a_cell_runs_and_its_last_line_is_checked(shell: InteractiveShell) -> None:
    both = shell.run_cell("%%tilefit --gpu h200 --gpu l4 --infer\nwide = rows[:64]\nmodel, wide").result
    assert isinstance(both, Comparison)
    assert both["l4"].inputs == ("0: float32[64,4096]",)
    assert "wide" in shell.user_ns


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%tilefit model rows --gpu h2000", "Did you mean h200 or "),
        ("%tilefit model rows --gpu h200 --output-file x.html", "--output-file has no effect in a notebook"),
        ("%tilefit model rows rows --gpu h200", "a model and its inputs"),
        ("%tilefit --gpu h200", "Missing argument"),
        ("%%tilefit --gpu h200\nx = 1", "End with: model, inputs."),
    ],
)
def test_mistakes_are_one_message(shell: InteractiveShell, capsys: Any, line: str, says: str) -> None:
    ran = shell.run_cell(line)
    assert ran.success
    assert ran.result is None
    assert says in capsys.readouterr().err


def test_reports_become_tables_and_files(shell: InteractiveShell, tmp_path: Any) -> None:
    report = shell.run_cell("%tilefit model rows --gpu h200").result
    assert isinstance(report, Report)
    table = report.to_pandas()
    assert table.time_s.sum() == pytest.approx(sum(row.time_s for row in report.ops))
    assert list(table.columns[:2]) == ["gpu", "kind"]
    assert set(report.to_pandas("findings").code) == {finding.code for finding in report.findings}
    with pytest.raises(tilefit.TilefitError, match="no rows 'rules'"):
        report.to_pandas("rules")
    report.save(tmp_path / "r.md")
    assert (tmp_path / "r.md").read_text().startswith("#")
    report.save(tmp_path / "r.bin", "json")
    assert (tmp_path / "r.bin").read_text() == f"{report.to_json()}\n"
    with pytest.raises(tilefit.TilefitError, match=r"end in \.docx"):
        report.save(tmp_path / "r.docx")
