"""The pages in ``docs/rules``: what a rule's class, its case and the recorded results say today."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "rules"
TORCH = torch.__version__.partition("+")[0]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "benchmarks"))
        patched.setattr(sys, "path", sys.path.copy())
        import rule_pages

        return rule_pages


def test_committed_pages_are_those_of_the_rules(generator: ModuleType) -> None:
    if f"torch {TORCH}:" not in (PAGES / "ALN001.md").read_text(encoding="utf-8"):
        pytest.skip("the pages were written with another version of torch, which runs other kernels")
    committed = {path.name: path.read_text(encoding="utf-8") for path in PAGES.glob("*.md")}
    written = generator.pages()
    again = "Run benchmarks/rule_pages.py."
    assert committed.keys() == written.keys(), again
    for name, text in written.items():
        # What training loops compute on the CPU differs in its last digits from one machine to the next.
        same = generator.without_numbers if name.startswith("AMP") else str
        assert same(committed[name]) == same(text), f"{name} is out of date. {again}"


def test_every_page_has_its_parts_and_its_links_lead_somewhere() -> None:
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    for page in PAGES.glob("[A-Z][A-Z][A-Z]0*.md"):
        text = page.read_text(encoding="utf-8")
        assert f"]({page.name})" in index
        for part in ("**What it sees:**", "**Source", "## Measured", page.stem):
            assert part in text, f"{page.name} lacks {part}"
    for page in PAGES.glob("*.md"):
        for target in re.findall(r"\]\(([^)#: ]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_measured_figures_are_read_not_typed(generator: ModuleType, tmp_path: Path, monkeypatch) -> None:
    """A page follows its JSON file: figures, GPU and day."""
    (tmp_path / "deepbench_h200.json").write_text(
        """{"provenance": {"gpu": "Some GPU", "date": "2031-02-03T04:05:06Z", "torch": "9.9"},
        "padding": [{"m": 7, "n": 8, "k": 9, "candidates": {"as it is": {"us": [30, 30, 30]},
        "padded": {"us": [20, 20, 20]}}}]}"""
    )
    monkeypatch.setattr(generator, "RESULTS", tmp_path)
    rules = {rule.code: rule for rule in generator.all_rules()}
    text = "\n".join(generator.measured(rules["ALN001"]))
    assert "| 7 x 8 x 9 | 30.0 | 20.0 | 1.50 |" in text
    assert "Some GPU, 2031-02-03, torch 9.9" in text
    assert "Not measured." in "\n".join(generator.measured(rules["BAT002"]))


def test_gains_of_applied_fixes_reach_the_pages_of_their_rules(
    generator: ModuleType, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "fix_gain_x.json").write_text(
        """{"gpu": "Some GPU", "date": "2031-02-03", "torch": "9.9", "rows": [
        {"model": "m", "wall_ms": [9, 7], "fixes": [
            {"name": "pad-vocabulary", "predicted_ms": 1.5, "measured_ms": 2.0}]}]}"""
    )
    monkeypatch.setattr(generator, "RESULTS", tmp_path)
    rules = {rule.code: rule for rule in generator.all_rules()}
    assert "| m: pad-vocabulary | 9.0 | 1.50 | 2.00 |" in "\n".join(generator.measured(rules["ALN002"]))
    assert "Not measured." in "\n".join(generator.measured(rules["ALN004"]))
