"""Every rule on its own cases, and the pages in ``docs/rules`` that are made of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from tilefit.precision.rules import PrecisionRule
from tilefit.rules import Rule
from tilefit.rules.finding import ERROR

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import rule_pages

PAGES = rule_pages.PAGES
TORCH = torch.__version__.partition("+")[0]
#: Rules whose findings no change of the step can price.
_UNPRICED = ("DAT001", "GRD002")
RULES = {rule.code: rule for rule in rule_pages.every_rule()}


def check_page(rule: rule_pages.AnyRule, shown: list[str]) -> None:
    path = PAGES / f"{rule.code}.md"
    if f"Run with torch {TORCH}:" not in (PAGES / "ALN001.md").read_text(encoding="utf-8"):
        pytest.skip("the pages were written with another version of torch, which runs other kernels")
    text = rule_pages.page(rule, shown)
    assert rule_pages.is_current(path, text), f"run benchmarks/rule_pages.py --only {rule.code}"


@pytest.mark.parametrize("rule", rule_pages.all_rules(), ids=lambda rule: rule.code)
def test_a_rule_finds_its_wrong_case_is_silent_on_its_right_one_and_keeps_its_promise(rule: Rule) -> None:
    wrong, right = rule_pages.cases(rule)
    (finding,) = wrong.findings
    assert finding.code == rule.code
    assert finding.source.startswith(f"{rule.code.lower()}.py:") or not finding.source
    if rule.code in _UNPRICED:
        assert not finding.gain_s
    elif finding.severity != ERROR:
        ratio = right.batch / wrong.batch if wrong.inputs != right.inputs else 1
        saved_s = wrong.step.time_s - right.step.time_s / ratio
        # What it cannot be sure of (that a copy is free, that a layout fits what follows) a rule leaves out.
        assert 0.5 * saved_s < finding.gain_s < 1.05 * saved_s
        assert finding.gain_s > 0
    check_page(rule, list(rule_pages.predicted(rule, wrong)))


@pytest.mark.parametrize("rule", rule_pages.precision_rules(), ids=lambda rule: rule.code)
def test_a_rule_of_the_debugger_sees_its_wrong_loop(rule: PrecisionRule) -> None:
    check_page(rule, list(rule_pages.wrong_loop(rule)))


def test_one_page_can_be_written_and_the_others_are_left_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(rule_pages, "PAGES", tmp_path)
    for name in ("ALN001.md", "ALN002.md", "XYZ001.md"):
        (tmp_path / name).write_text("old")
    monkeypatch.setattr(sys, "argv", ["rule_pages.py", "--only", "aln001"])
    rule_pages.main()
    assert (tmp_path / "ALN001.md").read_text(encoding="utf-8").startswith("# ALN001")
    assert (tmp_path / "ALN002.md").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ALN001.md", "ALN002.md", "README.md"]


def test_a_page_of_a_loop_is_the_same_on_a_cpu_that_rounds_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "AMP001.md"
    path.write_text("a loss of 1.25e-05")
    assert rule_pages.is_current(path, "a loss of 1.26e-05")
    assert not rule_pages.is_current(path, "a scale of 1.25e-05")
    assert not rule_pages.is_current(path.with_name("ALN001.md"), "a loss of 1.25e-05")


def test_lines_above_a_loop_in_its_file_are_not_in_its_page() -> None:
    for path in PAGES.glob("AMP*.md"):
        assert not re.search(r"tests/\S+\.py:\d", path.read_text(encoding="utf-8")), path.name


def test_every_page_has_its_parts_and_its_links_lead_somewhere() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {"README", *RULES}
    assert (PAGES / "README.md").read_text(encoding="utf-8") == rule_pages.index()
    for code in RULES:
        text = (PAGES / f"{code}.md").read_text(encoding="utf-8")
        for part in ("**What it sees:**", "**Source", "## Measured", code):
            assert part in text, f"{code} lacks {part}"
    for page in PAGES.glob("*.md"):
        for target in re.findall(r"\]\(([^)#: ]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_measured_figures_are_read_not_typed(tmp_path: Path, monkeypatch) -> None:
    """A page follows its JSON file: figures, GPU and day."""
    (tmp_path / "deepbench_h200.json").write_text(
        """{"provenance": {"gpu": "Some GPU", "date": "2031-02-03T04:05:06Z", "torch": "9.9"},
        "padding": [{"m": 7, "n": 8, "k": 9, "candidates": {"as it is": {"us": [30, 30, 30]},
        "padded": {"us": [20, 20, 20]}}}]}"""
    )
    monkeypatch.setattr(rule_pages, "RESULTS", tmp_path)
    text = "\n".join(rule_pages.measured(RULES["ALN001"]))
    assert "| 7 x 8 x 9 | 30.0 | 20.0 | 1.50 |" in text
    assert "Some GPU, 2031-02-03, torch 9.9" in text
    assert "Not measured." in "\n".join(rule_pages.measured(RULES["BAT002"]))


def test_gains_of_applied_fixes_reach_the_pages_of_their_rules(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "fix_gain_x.json").write_text(
        """{"gpu": "Some GPU", "date": "2031-02-03", "torch": "9.9", "rows": [
        {"model": "m", "wall_ms": [9, 7], "fixes": [
            {"name": "pad-vocabulary", "predicted_ms": 1.5, "measured_ms": 2.0}]}]}"""
    )
    monkeypatch.setattr(rule_pages, "RESULTS", tmp_path)
    assert "| m: pad-vocabulary | 9.0 | 1.50 | 2.00 |" in "\n".join(rule_pages.measured(RULES["ALN002"]))
    assert "Not measured." in "\n".join(rule_pages.measured(RULES["ALN004"]))
