"""The report in Markdown."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot
from markdown_it import MarkdownIt

from tilefit import units
from tilefit.report import Comparison, Report, Watched, render
from tilefit.report.markdown import LIMIT_BYTES, escape


def test_a_report(report: Report) -> None:
    assert render(report, "markdown", ops=True) == snapshot("""\
# gpt2 · training step

input\\_ids: int64\\[16,1024\\] · bf16 autocast · AdamW · 38\\.6 M parameters

|  | Big GPU 100GB |
| --- | --- |
| time | 40.0 ms |
| 80 % interval | 32.0 to 50.0 ms |
| GPU busy | 40.0 ms |
| host | 5.00 ms |
| rate | 118 TFLOP/s |
| share of peak | 28.8 % |
| memory used | 10.0 % |
| largest batch | 184 |
| findings | 2 |

## Findings

1. **ALN002** saves 8.00 ms (20.0 %), lm\\_head, transformers/models/gpt2/modeling\\_gpt2.py:712  \n\
   The vocabulary of 50257 is odd, so the three products of the head cannot use TMA.
   - 50257 = 29 x 1733; 50304 = 64 x 786
   - sm80 at 10.0 ms against sm90 at 2.00 ms
   - Fix (safe): Pad the embedding and the head to 50304 rows.
2. **NTC003** saves 1.20 ms (3.0 %), transformer.h.\\*.mlp.act (12 modules), model.py:42  \n\
   A chain of 3 pointwise operations reads and writes its activation 3 times.
   - 3 x 201 MB at 4 TB/s
   - Fix (advice): Compile the block, or call the fused form.

### Operations by time

| time | share | count | operation | phase | bound | module |
| --- | --- | --- | --- | --- | --- | --- |
| 12.0 ms | 30.0 % | 12 | gemm 16384x3072x768 TN bf16 | fwd | math | transformer.h.\\*.mlp.c\\_fc |
| 10.0 ms | 25.0 % | 1 | gemm 16384x50257x768 TN bf16 | fwd | math | lm\\_head |
| 8.00 ms | 20.0 % | 1 | gemm 16384x768x50257 NN bf16 | dgrad | math | lm\\_head |
| 7.00 ms | 17.5 % | 1 | gemm 50257x768x16384 NT bf16 | wgrad | math | lm\\_head |
| 2.40 ms | 6.0 % | 1 | adamw 124000000 fp32 | opt | memory |  |
| 500 µs | 1.2 % | 1 | gelu 50331648 bf16 | fwd | memory | transformer.h.0.mlp.act |
| 100 µs | 0.2 % | 1 | mylib.scan 1000 bf16 | fwd | latency | lm\\_head |

Covers 99\\.9 % of the FLOP and 99.8 % of the GPU time of 18 operations; by bytes alone: mylib.scan (1, 4.00 MB). Times from a model fitted to measurements of this GPU.

The loss is the mean of the output.
""")


def test_a_comparison(comparison: Comparison) -> None:
    assert render(comparison, "markdown") == snapshot("""\
# gpt2 · training step

input\\_ids: int64\\[16,1024\\] · bf16 autocast · AdamW · 38\\.6 M parameters

|  | Big GPU 100GB | Small GPU 10GB |
| --- | --- | --- |
| time | 40.0 ms | 200 ms |
| 80 % interval | 32.0 to 50.0 ms | 160 to 250 ms |
| GPU busy | 40.0 ms | 200 ms |
| host | 5.00 ms | 5.00 ms |
| rate | 118 TFLOP/s | 23.6 TFLOP/s |
| share of peak | 28.8 % | 28.8 % |
| memory used | 10.0 % | 100 % |
| largest batch | 184 | 14 |
| findings | 2 | 2 |

## What each change saves

| rule | module | Big GPU 100GB | Small GPU 10GB |
| --- | --- | --- | --- |
| BAT002 |  | – | cannot run |
| ALN002 | lm\\_head | 20.0 % | 25.0 % |
| NTC003 | transformer.h.\\*.mlp.act | 3.0 % | – |

## Findings on Big GPU 100GB

1. **ALN002** saves 8.00 ms (20.0 %), lm\\_head, transformers/models/gpt2/modeling\\_gpt2.py:712  \n\
   The vocabulary of 50257 is odd, so the three products of the head cannot use TMA.
   - 50257 = 29 x 1733; 50304 = 64 x 786
   - sm80 at 10.0 ms against sm90 at 2.00 ms
   - Fix (safe): Pad the embedding and the head to 50304 rows.
2. **NTC003** saves 1.20 ms (3.0 %), transformer.h.\\*.mlp.act (12 modules), model.py:42  \n\
   A chain of 3 pointwise operations reads and writes its activation 3 times.
   - 3 x 201 MB at 4 TB/s
   - Fix (advice): Compile the block, or call the fused form.

Covers 99\\.9 % of the FLOP and 99.8 % of the GPU time of 18 operations; by bytes alone: mylib.scan (1, 4.00 MB). Times from a model fitted to measurements of this GPU.

The loss is the mean of the output.

## Findings on Small GPU 10GB

1. **BAT002** cannot run, the whole step  \n\
   The step needs 12 GiB, the GPU has 10 GiB.
   - Fix (unsafe): Use a batch of 12.
2. **ALN002** saves 8.00 ms (25.0 %), lm\\_head, transformers/models/gpt2/modeling\\_gpt2.py:712  \n\
   The vocabulary of 50257 is odd, so the three products of the head cannot use TMA.
   - 50257 = 29 x 1733; 50304 = 64 x 786
   - sm80 at 10.0 ms against sm90 at 2.00 ms
   - Fix (safe): Pad the embedding and the head to 50304 rows.

Covers 99\\.9 % of the FLOP and 99.8 % of the GPU time of 18 operations; by bytes alone: mylib.scan (1, 4.00 MB). Times from a model fitted to measurements of this GPU.

The loss is the mean of the output.
""")


def test_nothing_found(healthy: Report) -> None:
    assert "Nothing worth changing." in render(healthy, "markdown")


def test_a_name_cannot_begin_a_list_a_heading_or_a_rule() -> None:
    for name in ("- x", "1. x", "2) x", "# x", "+ x", "===", "---", "> x"):
        assert MarkdownIt().render(f"text\n{escape(name)}") == f"<p>text\n{html.escape(name)}</p>\n"


def test_names_cannot_become_markup(hostile: Report) -> None:
    page = MarkdownIt("gfm-like", {"linkify": False}).render(render(hostile, "markdown", ops=True))
    assert "<script>" not in page
    assert "<em>" not in page
    assert page.count("<h1>") == 1
    assert "[red]&lt;script&gt;alert(1)&lt;/script&gt;|`*_x_*`[/red]" in page


# ---- the limit ---------------------------------------------------------------------------------


def _many(report: Report, count: int, **changes: Any) -> Report:
    findings = tuple(
        replace(report.findings[0], module=f"layers.{index}", gain_s=(count - index) * 1e-4, **changes)
        for index in range(count)
    )
    return replace(report, findings=findings)


def test_a_long_report_keeps_what_saves_most_and_says_what_it_leaves_out(report: Report) -> None:
    text = render(_many(report, 30), "markdown")
    assert len(text.encode()) <= LIMIT_BYTES
    # The first three have their arithmetic, the others a line each.
    assert text.count("50257 = 29 x 1733") == 3
    shown = re.findall(r"^(\d+)\. \*\*ALN002\*\*", text, re.MULTILINE)
    assert shown == [str(number) for number in range(1, len(shown) + 1)]
    assert 3 < len(shown) < 30
    last = text.splitlines()[-1]
    best_s = (30 - len(shown)) * 1e-4
    assert last.startswith(f"Left out, to keep this short: {30 - len(shown)} findings, ")
    assert f"saving at most {units.seconds(best_s)} each" in last


def test_all_of_it_has_no_limit(report: Report) -> None:
    text = render(_many(report, 30), "markdown", show_all=True)
    assert text.count("50257 = 29 x 1733") == 30
    assert "Left out" not in text


def test_the_operations_go_before_the_findings_do(report: Report) -> None:
    ops = tuple(
        replace(op, module=f"layer_{index}", shape=f"{index}") for index, op in enumerate(report.ops * 20)
    )
    text = render(replace(report, ops=ops), "markdown", ops=True)
    assert len(text.encode()) <= LIMIT_BYTES
    assert text.count("Fix (") == 2
    assert re.search(r"Left out, to keep this short: \d+ rows of operations\.\n$", text)


def test_a_long_watched_run(watched: Watched) -> None:
    table = replace(watched.tables[0], rows=tuple((f"op {index}", "1") for index in range(1000)))
    text = render(replace(watched, findings=watched.findings * 20, tables=(table,)), "markdown")
    assert len(text.encode()) <= LIMIT_BYTES
    assert "rows of Operations" in text.splitlines()[-1]


@given(
    word=st.text(min_size=1, max_size=3000),
    findings=st.integers(0, 60),
    inputs=st.integers(0, 60),
    gpus=st.integers(1, 30),
    ops=st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_limit_holds_whatever_the_report_holds(
    report: Report, word: str, findings: int, inputs: int, gpus: int, ops: bool
) -> None:
    big = replace(
        _many(report, findings, message=word, fix=word, arithmetic=(word,) * 3, source=word),
        model=word,
        inputs=(word,) * inputs,
        notes=(word,) * 5,
        device=replace(report.device, title=word),
    )
    document = big if gpus == 1 else Comparison((big,) * gpus)
    text = render(document, "markdown", ops=ops)
    assert len(text.encode(errors="replace")) <= LIMIT_BYTES
    assert text.startswith("# ")
