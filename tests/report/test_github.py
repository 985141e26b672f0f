"""Annotations of GitHub Actions."""

from __future__ import annotations

from dataclasses import replace

from inline_snapshot import snapshot

from tilefit.report import Comparison, Report, Watched, render


def test_a_report(report: Report) -> None:
    assert render(report, "github") == snapshot("""\
::warning file=transformers/models/gpt2/modeling_gpt2.py,line=712,title=ALN002 saves 8.00 ms (20.0 %25)::lm_head%0AThe vocabulary of 50257 is odd, so the three products of the head cannot use TMA.%0A50257 = 29 x 1733; 50304 = 64 x 786%0Asm80 at 10.0 ms against sm90 at 2.00 ms%0AFix (safe): Pad the embedding and the head to 50304 rows.
::notice file=model.py,line=42,title=NTC003 saves 1.20 ms (3.0 %25)::transformer.h.*.mlp.act%0AA chain of 3 pointwise operations reads and writes its activation 3 times.%0A3 x 201 MB at 4 TB/s%0AFix (advice): Compile the block, or call the fused form.
""")


def test_a_comparison_names_the_gpu_and_what_has_no_line_has_none(comparison: Comparison) -> None:
    *_, error, _ = render(comparison, "github").splitlines()
    assert error == snapshot(
        "::error title=BAT002 cannot run on small::The step needs 12 GiB, the GPU has 10 GiB.%0AFix (unsafe): Use a batch of 12."
    )


def test_a_watched_run(watched: Watched) -> None:
    assert render(watched, "github") == snapshot("""\
::error file=project/train.py,line=14,title=AMP001 error%2C 20 times from step 0 on::clipped at 1 while the gradients carry a loss scale of 65536%0Aeffective limit 1 / 65536 = 1.5e-05%0AFix: Call scaler.unscale_(optimizer) first.
::notice file=project/train.py,line=12,title=AMP018 note%2C in step 2::AdamW%0A4 losses are not averaged%0AFix: Divide each loss by 4.
""")


def test_nothing_found_is_no_line(healthy: Report) -> None:
    assert render(healthy, "github") == ""


def test_what_has_a_meaning_to_the_runner_is_escaped(report: Report) -> None:
    finding = replace(
        report.findings[0],
        source="a,b:c%.py:3",
        message="100 %\r\n::error::forged",
        arithmetic=(),
        fix="::set-output name=x::y",
    )
    (line,) = render(replace(report, findings=(finding,)), "github").splitlines()
    assert line == (
        "::warning file=a%2Cb%3Ac%25.py,line=3,title=ALN002 saves 8.00 ms (20.0 %25)"
        "::lm_head%0A100 %25 ::error::forged%0AFix (safe): ::set-output name=x::y"
    )


def test_a_name_cannot_begin_a_command(hostile: Report) -> None:
    (line,) = render(hostile, "github").splitlines()
    assert "\x1b" not in line
