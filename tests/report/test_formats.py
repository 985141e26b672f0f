"""Choosing a format."""

from __future__ import annotations

import json

import pytest

from tilefit.errors import UsageError
from tilefit.report import FORMATS, Report, render


def test_json_is_the_report_s_own(report: Report) -> None:
    assert json.loads(render(report, "json", ops=True)) == json.loads(report.to_json())


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_ends_with_one_line_feed(report: Report, name: str) -> None:
    text = render(report, name)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


def test_an_unknown_format_lists_the_known_ones(report: Report) -> None:
    with pytest.raises(UsageError, match="unknown format 'yaml'") as error:
        render(report, "yaml")
    assert "concise" in error.value.hint
