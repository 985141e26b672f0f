"""What is said on stderr while something runs."""

from __future__ import annotations

import sys
import time

import pytest
from rich.console import Console

from tilefit import console
from tilefit.cli import output


def test_what_takes_long_gets_a_line_where_nobody_watches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_PATIENCE_S", 0.1)
    with output.progress("Choosing fixes") as say:
        say("quick")
        say("pad-linear")
        time.sleep(0.5)
        say("as quick")
    time.sleep(0.3)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "Choosing fixes: pad-linear …\n"


def test_how_much_of_several_is_done_gets_a_line_where_nobody_watches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(output, "_EVERY_S", 0.5)
    for item in output.watched("Capturing", range(3), 3):
        time.sleep(0.3 if item < 2 else 0.0)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[0] == "Capturing …"
    time.sleep(0.3)
    assert capsys.readouterr().err == ""


def test_a_long_line_of_sizes_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(output, "_EVERY_S", 0.3)
    for _ in output.watched("Capturing", range(4), 4):
        time.sleep(0.4)
    assert "Capturing: 2 of 4 …" in capsys.readouterr().err.splitlines()


def test_what_stands_in_brackets_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Names come from the user's code, and layouts of weights are written so."""
    words = "blocks[0], [in, out], [/blocks] :smile:"
    output.stdout().print(words)
    output.stdout().print(console.table("", "", rows=[[words, "1"]]))
    Console(file=sys.stdout, width=80).print(console.table("", "", rows=[[words, "1"]]))
    assert capsys.readouterr().out.count(words) == 3
