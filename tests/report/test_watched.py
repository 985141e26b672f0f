"""The report of a watched run, in every format."""

from __future__ import annotations

import json

from inline_snapshot import snapshot

from tilefit.report import Table, Watched, render
from tilefit.rules.finding import Alarm

HOSTILE = "[red]<script>alert(1)</script>|`*_x_*`[/red]\x1b[31m\n# y"


def test_a_terminal(watched: Watched) -> None:
    assert str(watched) == snapshot("""\
train.py · 20 steps watched
autocast float16 · loss scale 65536 · AdamW

AMP001  train.py:14  error, 20 times from step 0 on
        clipped at 1 while the gradients carry a loss scale of 65536
      · effective limit 1 / 65536 = 1.5e-05
      → Call scaler.unscale_(optimizer) first.

AMP018  train.py:12  note, in step 2
        4 losses are not averaged
      → Divide each loss by 4.

Not checked  a compiled graph
Next         tilefit rule AMP001
Checked      0 rules; AMP002 could not be (--all says why)
""")


def test_a_terminal_with_everything(watched: Watched) -> None:
    text = render(watched, show_all=True)
    assert "project/train.py:14" in text
    assert "operation  float16" in text


def test_concise(watched: Watched) -> None:
    assert render(watched, "concise") == snapshot("""\
project/train.py:14: AMP001 clipped at 1 while the gradients carry a loss scale of 65536 [error, 20 times from step 0 on]
project/train.py:12: AMP018 4 losses are not averaged [note, in step 2]
""")


def test_markdown(watched: Watched) -> None:
    assert render(watched, "markdown") == snapshot("""\
# train.py · 20 steps watched

autocast float16 · loss scale 65536 · AdamW

## Findings

1. **AMP001** error, 20 times from step 0 on, project/train.py:14  \n\
   clipped at 1 while the gradients carry a loss scale of 65536
   - effective limit 1 / 65536 = 1.5e-05
   - Fix: Call scaler.unscale\\_(optimizer) first.
2. **AMP018** note, in step 2, project/train.py:12, AdamW  \n\
   4 losses are not averaged
   - Fix: Divide each loss by 4.

## Operations

| operation | float16 |
| --- | --- |
| mm | 12 |

Not checked: a compiled graph
""")


def test_json(watched: Watched) -> None:
    data = json.loads(render(watched, "json"))
    assert data["kind"] == "watched"
    assert [finding["code"] for finding in data["findings"]] == ["AMP001", "AMP018"]
    assert data["tables"][0]["rows"] == [["mm", "12"]]
    assert data["unchecked"] == ["a compiled graph"]


def test_html(watched: Watched) -> None:
    html = watched._repr_html_()
    assert '<details class="error"><summary><b>AMP001</b>' in html
    assert "<td>mm</td><td>12</td>" in html
    assert "Not checked: a compiled graph" in html


def test_nothing_wrong_is_an_answer(watched: Watched) -> None:
    healthy = Watched("train.py", (), 20, (), (), (), "1.0")
    assert (watched.exit_code, healthy.exit_code) == (1, 0)
    for text in (str(healthy), render(healthy, "markdown"), healthy._repr_html_()):
        assert "Nothing wrong." in text
    assert render(healthy, "concise") == ""


def test_names_that_try_to_be_markup_are_shown_as_they_are() -> None:
    alarm = Alarm(
        code="AMP001",
        severity="error",
        source=HOSTILE,
        message=HOSTILE,
        fix=HOSTILE,
        module=HOSTILE,
        arithmetic=(HOSTILE,),
    )
    document = Watched(
        HOSTILE, (HOSTILE,), 1, (alarm,), (Table(HOSTILE, (HOSTILE,), ((HOSTILE,),)),), (HOSTILE,), "1.0"
    )
    assert "<script>" not in document._repr_html_()
    assert "\x1b" not in render(document, "text", show_all=True)
    assert "[red]" in render(document, "text", show_all=True, width=200)
    assert "<script>" not in render(document, "markdown")
    assert len(render(document, "concise").splitlines()) == 1
