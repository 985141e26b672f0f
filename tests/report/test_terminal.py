"""The report on a terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from inline_snapshot import snapshot
from rich.console import Console

from tilefit.report import Comparison, Report, render
from tilefit.report.terminal import SCREEN_LINES
from tilefit.report.text import times


def test_a_report(report: Report) -> None:
    assert render(report) == snapshot("""\
gpt2 · training step on Big GPU 100GB
input_ids: int64[16,1024] · bf16 autocast · AdamW · 38.6 M parameters

Time    40.0 ms (32.0 to 50.0 ms)  GPU 40.0 ms, host 5.00 ms
Rate    118 TFLOP/s  28.8 % of the bf16 peak, 410 TFLOP/s
Bound   ███████████▒  █ math 92 %  ▒ memory 7 %
Memory  9.31 GiB of 93.1 GiB (10.0 %)  largest batch that fits 184

ALN002  saves 8.00 ms (20.0 %)  lm_head  modeling_gpt2.py:712
        The vocabulary of 50257 is odd, so the three products of the head cannot
        use TMA.
      · 50257 = 29 x 1733; 50304 = 64 x 786
      → Pad the embedding and the head to 50304 rows. (safe)

NTC003  saves 1.20 ms (3.0 %)  transformer.h.*.mlp.act (12 modules)  model.py:42
        A chain of 3 pointwise operations reads and writes its activation 3
        times.
      · 3 x 201 MB at 4 TB/s
      → Compile the block, or call the fused form. (advice)

GPU time  gemm 92.5 %, optimizer 6.0 %, pointwise 1.2 %, other 0.2 %
Covers    99.9 % of the FLOP and 99.8 % of the GPU time of 18 operations; by
          bytes alone: mylib.scan (1, 4.00 MB)
Times     from a model fitted to measurements of this GPU
Note      The loss is the mean of the output.
Next      tilefit gemm 16384 50257 768 --gpu big
          tilefit rule ALN002
""")


def test_all_of_a_report_with_its_operations(report: Report) -> None:
    assert render(report, show_all=True, ops=True, width=100) == snapshot("""\
gpt2 · training step on Big GPU 100GB
input_ids: int64[16,1024] · bf16 autocast · AdamW · 38.6 M parameters

Time    40.0 ms (32.0 to 50.0 ms)  GPU 40.0 ms, host 5.00 ms
Rate    118 TFLOP/s  28.8 % of the bf16 peak, 410 TFLOP/s
Bound   ███████████▒  █ math 92 %  ▒ memory 7 %
Memory  9.31 GiB of 93.1 GiB (10.0 %)  largest batch that fits 184

ALN002  saves 8.00 ms (20.0 %)  lm_head
        transformers/models/gpt2/modeling_gpt2.py:712
        The vocabulary of 50257 is odd, so the three products of the head cannot use TMA.
      · 50257 = 29 x 1733; 50304 = 64 x 786
      · sm80 at 10.0 ms against sm90 at 2.00 ms
      → Pad the embedding and the head to 50304 rows. (safe)
      ± 80 % interval 6.00 to 10.0 ms
      $ tilefit gemm 16384 50257 768 --gpu big

NTC003  saves 1.20 ms (3.0 %)  transformer.h.*.mlp.act (12 modules)
        model.py:42
        A chain of 3 pointwise operations reads and writes its activation 3 times.
      · 3 x 201 MB at 4 TB/s
      → Compile the block, or call the fused form. (advice)
      ± 80 % interval 1.00 to 1.40 ms

   time   share  count  operation                     phase  bound    module
12.0 ms  30.0 %     12  gemm 16384x3072x768 TN bf16   fwd    math     transformer.h.*.mlp.c_fc
10.0 ms  25.0 %      1  gemm 16384x50257x768 TN bf16  fwd    math     lm_head
8.00 ms  20.0 %      1  gemm 16384x768x50257 NN bf16  dgrad  math     lm_head
7.00 ms  17.5 %      1  gemm 50257x768x16384 NT bf16  wgrad  math     lm_head
2.40 ms   6.0 %      1  adamw 124000000 fp32          opt    memory
 500 µs   1.2 %      1  gelu 50331648 bf16            fwd    memory   transformer.h.0.mlp.act
 100 µs   0.2 %      1  mylib.scan 1000 bf16          fwd    latency  lm_head

GPU time    gemm 92.5 %, optimizer 6.0 %, pointwise 1.2 %, other 0.2 %
By phase    forward 56.5 %, backward-data 20.0 %, backward-weight 17.5 %, optimizer 6.0 %
Arithmetic  4.72 TFLOP, 10.5 GB moved
Memory      parameters 477 MiB, gradients 477 MiB, optimizer state 954 MiB, activations 6.52 GiB,
            working space 954 MiB
Covers      99.9 % of the FLOP and 99.8 % of the GPU time of 18 operations; by bytes alone:
            mylib.scan (1, 4.00 MB)
Times       from a model fitted to measurements of this GPU
Note        The loss is the mean of the output.
Next        tilefit gemm 16384 50257 768 --gpu big
            tilefit rule ALN002
""")


def test_nothing_found(healthy: Report) -> None:
    assert "Nothing worth changing." in render(healthy)


def test_a_comparison(comparison: Comparison) -> None:
    assert render(comparison) == snapshot("""\
gpt2 · training step on 2 GPUs
input_ids: int64[16,1024] · bf16 autocast · AdamW · 38.6 M parameters

                                              big           small
time                                      40.0 ms          200 ms
80 % interval                     32.0 to 50.0 ms   160 to 250 ms
GPU busy                                  40.0 ms          200 ms
host                                      5.00 ms         5.00 ms
rate                                  118 TFLOP/s    23.6 TFLOP/s
share of peak                              28.8 %          28.8 %
memory used                                10.0 %           100 %
largest batch                                 184              14
findings                                        2               2

what a change saves
BAT002                                          –      cannot run
ALN002  lm_head                            20.0 %          25.0 %
NTC003  transformer.h.*.mlp.act             3.0 %               –

Name one GPU to see what to change, such as --gpu big
""")


def test_more_gpus_than_fit_beside_each_other(comparison: Comparison) -> None:
    many = Comparison(tuple(replace(comparison.reports[0], gpu=f"gpu-{i}") for i in range(9)))
    text = render(many)
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"gpu-{i}" in text for i in range(9))


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("show_all", [False, True])
def test_no_line_is_wider_than_the_terminal(report: Report, width: int, show_all: bool) -> None:
    text = render(report, show_all=show_all, ops=True, width=width)
    assert max(map(len, text.splitlines())) <= width


def test_many_findings_fit_a_screen_and_say_what_is_left_out(report: Report) -> None:
    many = replace(report, findings=report.findings * 10)
    text = render(many)
    assert len(text.splitlines()) <= SCREEN_LINES + 2
    assert "more, saving at most 8.00 ms each: add --all" in text
    assert render(many, show_all=True).count("ALN002  saves") == 10


def test_a_single_finding_left_out_is_no_each(report: Report) -> None:
    texts = [render(replace(report, findings=report.findings[:1] * number)) for number in range(1, 12)]
    (text,) = [text for text in texts if "\n1 more" in text]
    assert "1 more, saving 8.00 ms: add --all" in text


def test_one_operation_is_one(report: Report) -> None:
    single = replace(report, step=replace(report.step, op_count=1))
    assert "of 1 operation;" in " ".join(render(single).split())


def test_an_error_comes_without_a_price(comparison: Comparison) -> None:
    assert "BAT002  cannot run" in render(comparison["small"])


def test_markup_and_control_characters_in_names_stay_text(hostile: Report) -> None:
    text = render(hostile, show_all=True, ops=True, width=400)
    # Heading, input, device, site, source, message, arithmetic, fix, command, operations, coverage, note, …
    assert text.count("[red]<script>alert(1)</script>|`*_x_*`[/red]") == text.count("script>|") > 12
    assert "\x1b" not in text


def test_colour_only_on_a_terminal_that_wants_it(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(**environment: str) -> str:
        monkeypatch.delenv("NO_COLOR", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        file = io.StringIO()
        Console(file=file, force_terminal=True, width=80, color_system="standard").print(report)
        return file.getvalue()

    assert "\x1b[1;33mALN002" in shown()
    assert "\x1b[1;33m" not in shown(NO_COLOR="1")
    assert "\x1b" not in render(report)


def test_a_report_as_text_is_the_terminal_s(report: Report) -> None:
    assert str(report) == render(report)


def test_a_step_that_the_host_limits_says_so_first(report: Report) -> None:
    step = replace(
        report.step, time_s=0.04, host_time_s=0.04, gpu_time_s=0.03, bounds_s={"math": 0.03, "launch": 0.01}
    )
    first = render(replace(report, step=step)).splitlines()[3]
    assert first == "Host    limits this step: 40.0 ms to launch it, the GPU works for 30.0 ms"
    assert "Host " not in render(report)


def test_a_larger_batch_saves_nothing_and_gets_more_done(report: Report) -> None:
    larger = replace(report.findings[0], code="BAT001", safety="throughput", gain_s=0.03, gain_fraction=0.75)
    larger = replace(larger, gain_low_s=0.02, gain_high_s=0.035)
    text = render(replace(report, findings=(larger,)), show_all=True)
    assert "BAT001  4.00 times the throughput" in text
    assert "80 % interval 2.00 to 8.00 times" in text
    assert "saves" not in text
    many = render(replace(report, findings=(*report.findings[:1] * 9, larger, larger)))
    assert "saving at most 8.00 ms each: add --all" in many


@pytest.mark.parametrize(
    ("provenance", "profile", "told"),
    [
        ("estimated", "measured by A", "from a model fitted to measurements of this GPU (measured by A)"),
        ("estimated", "the B's, measured by A", "from a model fitted to measurements of this GPU"),
        ("transferred", "measured by A", "carried over from measurements of another GPU"),
        (
            "transferred",
            "the B's, measured by A",
            "carried over from measurements of another GPU (the B's, measured by A)",
        ),
    ],
)
def test_no_measurements_are_told_of_that_the_times_do_not_rest_on(
    provenance: str, profile: str, told: str
) -> None:
    assert times(provenance, profile) == told
