"""The report in a notebook."""

from __future__ import annotations

from html.parser import HTMLParser

from tilefit.report import Comparison, Report

_VOID = {"br"}


class _Balance(HTMLParser):
    """Collects tags and text, and fails on an element that is not closed where it should be."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_notebook_shows_the_findings_with_their_price(report: Report) -> None:
    page = _Balance(report._repr_html_())
    assert "saves 8.00 ms (20.0 %)" in page.text
    assert "Pad the embedding and the head to 50304 rows." in page.text
    assert "29 x 1733" in page.text


def test_a_comparison_has_a_column_per_gpu(comparison: Comparison) -> None:
    page = _Balance(comparison._repr_html_())
    assert "Big GPU 100GB" in page.text
    assert "Small GPU 10GB" in page.text
    assert "cannot run" in page.text


def test_nothing_found(healthy: Report) -> None:
    assert "Nothing worth changing." in _Balance(healthy._repr_html_()).text


def test_names_cannot_become_elements(hostile: Report) -> None:
    page = _Balance(hostile._repr_html_())
    assert "script" not in page.tags
    assert "[red]<script>alert(1)</script>" in page.text


def test_it_needs_nothing_from_elsewhere(report: Report) -> None:
    html = report._repr_html_()
    assert "http" not in html
    assert "<script" not in html
