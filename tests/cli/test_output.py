"""What is said on stderr while something runs."""

from __future__ import annotations

import time

import pytest

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
