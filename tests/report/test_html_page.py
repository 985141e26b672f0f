"""The HTML page, as a file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from inline_snapshot import snapshot

from report.conftest import GPU, STEP, estimate
from tilefit.cost import StepEstimate
from tilefit.cost.estimate import BOUNDS, EXPOSED, LAUNCH, WAITS
from tilefit.ops import FORWARD, Gemm, Site, StepOp, timeline
from tilefit.report import Comparison, Report, Watched, build, render, text
from tilefit.report.build import batch_curve
from tilefit.report.html_figures import roofline
from tilefit.report.html_modules import tree
from tilefit.report.report import BatchPoint, HostWait, MeasuredOp, MeasuredStep
from tilefit.rules.finding import RulePage

_VOID = {"br", "meta", "input"}
#: Elements without text of their own that begin a new line of the outline.
_BLOCKS = {
    "p",
    "h1",
    "h2",
    "h3",
    "li",
    "tr",
    "dt",
    "dd",
    "summary",
    "figcaption",
    "section",
    "option",
    "title",
}


class _Outline(HTMLParser):
    """The text of a page, a line per block; fails on an element that is not closed where it should be."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.blocks = [""]
        self.script = ""
        self.data: list[str] = []
        self.feed(html)
        assert not self.open
        self.text = "\n".join(filter(None, (" ".join(block.split()) for block in self.blocks)))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)
        if tag in _BLOCKS:
            self.blocks.append("")
        if dict(attrs).get("type") == "application/json":
            self.data.append("")

    def handle_endtag(self, tag: str) -> None:
        # Shapes of an SVG may close themselves; HTMLParser reports both ends.
        assert self.open.pop() == tag, tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if "script" in self.open and dict(self.tags[-1][1]).get("type") == "application/json":
            self.data[-1] += data
        elif "style" not in self.open and "script" not in self.open:
            self.blocks[-1] += f" {data}"


@pytest.fixture
def full(report: Report) -> Report:
    """The report with all that a page can show."""
    curve = tuple(
        BatchPoint(b, (b + 4) * 2e-3, (b + 3) * 2e-3, (b + 6) * 2e-3, b * 10**9) for b in (8, 16, 32)
    )
    ops = tuple(replace(op, tile=(128, 256), waves=92.16) if op.product else op for op in report.ops)
    return replace(
        report, batch_curve=curve, environment={"Python": "3.11.7"}, ops=ops, version="1.0", rules=()
    )


def test_the_page(full: Report) -> None:
    assert _Outline(full.to_html()).text == snapshot("""\
gpt2 · training step on Big GPU 100GB · tilefit Skip to the findings
tilefit
gpt2 · training step
input_ids: int64[16,1024] bf16 autocast AdamW 38.6 M parameters
40.0 ms a step: no change has a price worth it
410,000 tokens per second What to change The step Operations Modules Other batches Memory About
A training step on Big GPU 100GB
time estimated
40.0 ms
32.0 to 50.0 ms in 80 % of cases
rate
118 TFLOP/s
28.8 % of the bf16 peak, 410 TFLOP/s
memory
9.31 GiB
10.0 % of 93.1 GiB; largest batch 184
GPU and host
40.0 ms
of work for the GPU; the host needs 5.00 ms to launch it
limited by
math: 37.0 ms
memory: 2.90 ms
latency: 100 µs
math 37.0 ms 92.5 %
memory 2.90 ms 7.2 %
latency 100 µs 0.2 %
by pass
forward: 22.6 ms
data gradient: 8.00 ms
weight gradient: 7.00 ms
optimizer: 2.40 ms
forward 22.6 ms 56.5 %
data gradient 8.00 ms 20.0 %
weight gradient 7.00 ms 17.5 %
optimizer 2.40 ms 6.0 %
by kind
gemm: 37.0 ms
optimizer: 2.40 ms
pointwise: 500 µs
other kinds: 100 µs
gemm 37.0 ms 92.5 %
optimizer 2.40 ms 6.0 %
pointwise 500 µs 1.2 %
other kinds 100 µs 0.3 %
What these words mean
limited by math
The arithmetic units are busy: this is what a GPU is bought for.
limited by memory
The arithmetic units wait for bytes from the GPU's memory.
limited by latency
Too little runs at once to fill the GPU, or starting and ending it takes the time.
limited by launch
The GPU waits for the program to tell it what to do next.
peak
The most arithmetic the GPU could do, from its datasheet, without sparsity.
data gradient (dgrad), weight gradient (wgrad)
The two halves of the backward pass: the gradient of a layer's input, and of its weights.
gemm, conv
Matrix products, as of linear layers, and convolutions: what the GPU's Tensor Cores are for.
pointwise, copy
What reads each number, changes it or not, and writes it: activations, sums, casts, copies.
measured
It was timed on such a GPU.
estimated
It was predicted by a model that was fitted to measurements of such a GPU.
transferred
It was predicted by such a model of another GPU, with this one's datasheet.
datasheet
It was predicted, or copied, from the GPU's datasheet; nothing was measured.
What to change
Each saving is what the whole step gains when it is estimated again with this one change. Savings overlap: they do not add up. Safe keeps the function the same, unsafe may change training, advice needs your judgement; throughput makes no step shorter, but each does more work.
ALN002 saves 8.00 ms (20.0 %)
lm_head transformers/models/gpt2/modeling_gpt2.py:712
6.00 to 10.0 ms
The vocabulary of 50257 is odd, so the three products of the head cannot use TMA.
50257 = 29 x 1733; 50304 = 64 x 786
sm80 at 10.0 ms against sm90 at 2.00 ms
→ Pad the embedding and the head to 50304 rows. safe
tilefit gemm 16384 50257 768 --gpu big
NTC003 saves 1.20 ms (3.0 %)
transformer.h.*.mlp.act (12 modules) model.py:42
1.00 to 1.40 ms
A chain of 3 pointwise operations reads and writes its activation 3 times.
3 x 201 MB at 4 TB/s
→ Compile the block, or call the fused form. advice
The step in order
What the GPU does from the first operation to the last, 40.0 ms from left to right, in the colours of the bars above.
pass
forward: 22.5 ms from 0 ns on, from transformer.h.0.mlp.c_fc on
backward-data: 8.00 ms from 22.5 ms on, from lm_head on
backward-weight: 7.00 ms from 30.5 ms on, from lm_head on
forward: 100 µs from 37.5 ms on, from lm_head on
optimizer: 2.40 ms from 37.6 ms on, from the whole step on
kind
gemm: 12.0 ms from 0 ns on, from transformer.h.0.mlp.c_fc on
pointwise: 500 µs from 12.0 ms on, from transformer.h.0.mlp.act on
gemm: 25.0 ms from 12.5 ms on, from lm_head on
other: 100 µs from 37.5 ms on, from lm_head on
optimizer: 2.40 ms from 37.6 ms on, from the whole step on
limited by
math: 12.0 ms from 0 ns on, from transformer.h.0.mlp.c_fc on
memory: 500 µs from 12.0 ms on, from transformer.h.0.mlp.act on
math: 25.0 ms from 12.5 ms on, from lm_head on
latency: 100 µs from 37.5 ms on, from lm_head on
memory: 2.40 ms from 37.6 ms on, from the whole step on
Operations
Every operation of the step, identical ones as one point and one row. A GPU has two limits, drawn as roofs: the slanted one is how fast its memory delivers bytes, the level one how fast it can compute. Only what finds its operands in the cache can be above the roofs; the farther below, the more of the GPU it wastes. To the right is much arithmetic for every byte moved. The larger a point, the more of the time it takes. The roofs are datasheet , the points estimated . 100M 1G 10G 100G 1T 10T 100T 1P 0.0001 0.001 0.01 0.1 1 10 100 1k 10k FLOP per byte moved → ↑ FLOP/s
gemm 16384x3072x768 TN bf16: 30.0 % of the GPU time
gemm 16384x50257x768 TN bf16: 25.0 % of the GPU time
gemm 16384x768x50257 NN bf16: 20.0 % of the GPU time
gemm 50257x768x16384 NT bf16: 17.5 % of the GPU time
adamw 124000000 fp32: 6.0 % of the GPU time
gelu 50331648 bf16: 1.2 % of the GPU time
mylib.scan 1000 bf16: 0.2 % of the GPU time memory: 4.00 TB/s bf16: 410 TFLOP/s fp32: 25.6 TFLOP/s
gemm
optimizer
pointwise
other Find Pass
all
fwd
dgrad
wgrad
opt Limited by
all
math
memory
latency
operation ms share times pass limited by FLOP/B of roof
gemm 16384x3072x768 TN bf16 transformer.h.*.mlp.c_fc 12.000 30.0 % 12 fwd math 592 19 %
gemm 16384x50257x768 TN bf16 lm_head 10.000 25.0 % 1 fwd math 723 31 %
gemm 16384x768x50257 NN bf16 lm_head 8.000 20.0 % 1 dgrad math 723 39 %
gemm 50257x768x16384 NT bf16 lm_head 7.000 17.5 % 1 wgrad math 723 44 %
adamw 124000000 fp32 2.400 6.0 % 1 opt memory 0.0354 36 %
gelu 50331648 bf16 transformer.h.0.mlp.act 0.500 1.2 % 1 fwd memory 0.250 10 %
mylib.scan 1000 bf16 lm_head 0.100 0.2 % 1 fwd latency 0.000250 1 %
Time by module
Where in the model the GPU's time goes, by pass. Modules that consist of the same parts are taken together (× says how many); parts below 0.2 % of the time are left out.
forward
data gradient
weight gradient
optimizer lm_head
forward: 10.1 ms
data gradient: 8.00 ms
weight gradient: 7.00 ms 25.1 ms 62.7 %
transformer.h
forward: 12.5 ms 12.5 ms 31.3 % 1…11.mlp.c_fc × 11
forward: 11.0 ms 11.0 ms 27.5 %
0.mlp
forward: 1.50 ms 1.50 ms 3.7 % c_fc
forward: 1.00 ms 1.00 ms 2.5 % act
forward: 500 µs 500 µs 1.2 % optimizer
optimizer: 2.40 ms 2.40 ms 6.0 %
Other batches
The same step with more or fewer samples, as far as they fit the memory; the large dot is the batch of this report, 16. With few samples the GPU reads all weights for little arithmetic, or waits to be told what to do. From a batch of 32 on, the rate is within 5 % of the best. The shade is where the truth should lie in 80 % of cases.
samples per second 0 100 200 300 400 500 8 16 32 batch →
batch 8: 333.3
batch 16: 400
batch 32: 444.4
time of a step 0 16.0 ms 32.0 ms 48.0 ms 64.0 ms 80.0 ms 8 16 32 batch →
batch 8: 24.0 ms
batch 16: 40.0 ms
batch 32: 72.0 ms
Memory
What fills the GPU's memory at its fullest moment. The allocator's fragmentation, workspaces of libraries and the CUDA context come on top of it.
of 93.1 GiB
parameters: 477 MiB
gradients: 477 MiB
optimizer state: 954 MiB
activations: 6.52 GiB
working space: 954 MiB
free: 83.8 GiB
parameters 477 MiB 0.5 %
gradients 477 MiB 0.5 %
optimizer state 954 MiB 1.0 %
activations 6.52 GiB 7.0 %
working space 954 MiB 1.0 %
free 83.8 GiB 90.0 %
About these numbers
times
from a model fitted to measurements of this GPU
coverage
99.9 % of the FLOP and 99.8 % of the GPU time of 18 operations; by bytes alone: mylib.scan (1, 4.00 MB)
GPU
Big GPU 100GB: 100 SMs, 93.1 GiB at 4.00 TB/s datasheet
inputs
input_ids: int64[16,1024]
versions
tilefit 1.0, Python 3.11.7
note
The loss is the mean of the output.
To go on: tilefit gemm 16384 50257 768 --gpu big , tilefit rule ALN002
Made by tilefit 1.0. Nothing on this page was loaded from elsewhere, and it sends nothing.\
""")


def test_every_operation_is_a_point_and_in_a_row(full: Report) -> None:
    page = _Outline(full.to_html())
    (data,) = map(json.loads, page.data)
    assert sum(len(row["sites"]) for row in data["rows"]) == len(full.ops)
    assert sum(row["time"] for row in data["rows"]) == pytest.approx(sum(op.time_s for op in full.ops))
    points = {attrs["data-row"] for tag, attrs in page.tags if tag == "circle" and "data-row" in attrs}
    assert points == {str(index) for index in range(len(data["rows"]))}


def test_operations_on_the_roof_lie_on_it_and_slow_ones_below(full: Report) -> None:
    op = replace(full.ops[0], flop=10**12, moved_bytes=10**9)
    peak_s = op.flop / full.device.peak_flop_per_s
    at_peak, slow = (replace(op, time_s=time_s, shape=str(time_s)) for time_s in (peak_s, 10 * peak_s))
    page = _Outline(replace(full, ops=(at_peak, slow)).to_html())
    points = {attrs["data-row"]: attrs for tag, attrs in page.tags if tag == "circle" and "data-row" in attrs}
    roof = next(
        attrs
        for tag, attrs in page.tags
        if tag == "line" and attrs.get("x2") == "700" and "x1" in attrs and float(attrs["x1"] or 0) > 100
    )
    fast = next(attrs for attrs in points.values() if attrs["cy"] == roof["y1"])
    other = next(attrs for attrs in points.values() if attrs is not fast)
    assert float(other["cy"] or 0) > float(fast["cy"] or 0)
    assert fast["cx"] == other["cx"]


def test_roofs_of_one_height_stand_in_one_order(full: Report) -> None:
    names = ["bf16", "fp16", "fp32", "fp8", "int8", "tf32"]
    ops = tuple(replace(full.ops[0], kind="gemm", dtype=name) for name in names)
    device = replace(full.device, peaks_flop_per_s=dict.fromkeys(names, 1e15), peak_dtype="bf16")
    groups = text.grouped(ops)
    drawn = roofline(replace(full, ops=ops, device=device), groups, [1e12] * len(groups))
    assert [roof.label.partition(":")[0] for roof in drawn.roofs] == names


def test_nothing_is_loaded_and_only_the_page_s_own_script_may_run(full: Report) -> None:
    page = _Outline(full.to_html())
    for tag, attrs in page.tags:
        assert not attrs.keys() & {"src", "onclick", "onload", "style", "action", "srcset"}, (tag, attrs)
        assert (attrs.get("href") or "#").startswith("#")
    policy = next(
        attrs["content"] or ""
        for tag, attrs in page.tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy


def test_a_finding_says_why_in_the_words_of_its_rule(report: Report) -> None:
    pages = (
        RulePage("ALN002", "odd vocabulary", "The head is slow.\n\nFix: ``vocab_size=50304`` & <mask>."),
    )
    html = replace(report, rules=pages).to_html()
    assert "Why: odd vocabulary" in _Outline(html).text
    assert "<p>Fix: <code>vocab_size=50304</code> &amp; &lt;mask&gt;.</p>" in html


def test_every_part_of_a_figure_has_a_colour(report: Report) -> None:
    """What has none is black in a bar, and nothing in a legend."""
    owners = dict.fromkeys(timeline.OWNERS, 1 << 20)
    bounds = dict.fromkeys((*BOUNDS, LAUNCH, WAITS, EXPOSED), 1e-3)
    step = replace(report.step, bounds_s=bounds, memory=replace(report.step.memory, owners=owners))
    html = replace(report, step=step).to_html()
    classes = set(re.findall(r'class="(?:round )?(c-[\w-]+)"', html))
    assert {"c-communication", "c-casts-of-parameters", "c-waits"} <= classes
    assert [name for name in classes if f".{name} {{ fill" not in html] == []


def test_roofs_close_to_each_other_have_labels_below_each_other(report: Report) -> None:
    limits = {"fp16": 2.1e14, "tf32": 2.0e14, "fp32": 1.9e14}
    device = replace(report.device, peaks_flop_per_s=limits, peak_dtype="fp16", peak_flop_per_s=2.1e14)
    ops = [replace(report.ops[0], dtype=name) for name in limits]
    drawn = replace(report, device=device, ops=tuple(ops))
    groups = text.grouped(drawn.ops)
    labels = [roof.label_y for roof in roofline(drawn, groups, [1e13] * len(groups)).roofs]
    assert len(labels) == 3
    assert all(lower - upper >= 20 for upper, lower in pairwise(labels))


def test_nothing_found(healthy: Report) -> None:
    text = _Outline(healthy.to_html()).text
    assert "Nothing worth changing." in text
    assert "To go on" not in text


def test_a_comparison_has_a_part_per_gpu_with_anchors_of_its_own(comparison: Comparison) -> None:
    page = _Outline(comparison.to_html())
    assert "2 GPUs side by side" in page.text
    assert "cannot run" in page.text
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    anchors = {(attrs["href"] or "").removeprefix("#") for tag, attrs in page.tags if tag == "a"}
    assert anchors <= set(ids)


def test_a_step_without_operations_has_a_page(report: Report) -> None:
    page = _Outline(replace(report, ops=()).to_html())
    assert "Time by module" not in page.text


def test_a_report_that_knows_one_peak_alone_has_a_page(report: Report) -> None:
    device = replace(report.device, sms=0, peaks_flop_per_s={})
    page = _Outline(replace(report, device=device).to_html())
    assert f"{device.peak_dtype}: 410 TFLOP/s" in page.text
    assert "0 SMs" not in page.text


@pytest.mark.parametrize(
    "name",
    [
        "<script>alert(1)</script>",
        "</script><script>alert(1)</script>",
        "<!--<script>",
        "\"'><img src=x onerror=alert(1)>",
        "{{ 7 * 7 }}{% raw %}",
        "模块.层\u202e\u2028\x00\x1b[31m",
        "x" * 5000,
    ],
)
def test_names_are_shown_as_they_are_and_never_become_markup(report: Report, name: str) -> None:
    ops = tuple(replace(op, module=name, source=name, name=name, reason=name) for op in report.ops)
    finding = replace(
        report.findings[0],
        module=name,
        source=name,
        message=name,
        fix=name,
        arithmetic=(name,),
        next_command=name,
    )
    hostile = replace(
        report,
        model=name,
        inputs=(name,),
        notes=(name,),
        ops=ops,
        findings=(finding,),
        device=replace(report.device, title=name),
        environment={name: name},
        profile=name,
    )
    html, plain = hostile.to_html(), report.to_html()
    page = _Outline(html)
    shown = " ".join(re.sub(r"[\x00-\x1f\u2028\u202e]+", " ", name).split())
    assert page.text.count(shown) >= 10
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in _Outline(plain).tags}
    assert html.lower().count("<script") == plain.lower().count("<script")
    assert json.loads(page.data[0])["sites"][0] == [shown, shown]
    assert "\x1b" not in html
    assert "\u202e" not in html


def test_a_large_model_stays_below_a_megabyte(report: Report) -> None:
    """80 layers of 140 operations, at 14 modules each, as a training step of a 70B model has."""
    ops = tuple(
        replace(
            report.ops[index % 13],
            module=f"model.layers.{layer}.self_attention.projection_{index % 14}",
            source="transformers/models/llama/modeling_llama.py:1234",
            shape=f"{index}x8192x28672",
        )
        for layer in range(80)
        for index in range(140)
    )
    assert len(replace(report, ops=ops).to_html().encode()) < 1_000_000


def test_the_page_of_a_watched_run(report: Report) -> None:
    text = _Outline(Watched("train.py", ("AdamW",), 20, (), (), ("a compiled graph",), "1.0").to_html()).text
    assert "train.py · 20 steps watched" in text
    assert "Nothing wrong." in text
    assert "a compiled graph" in text


def test_the_format_is_the_page(report: Report) -> None:
    assert render(report, "html") == report.to_html()


def test_layers_that_consist_of_the_same_parts_are_one_part(report: Report) -> None:
    """``h.0`` to ``h.2`` are alike; ``head.0`` and ``head.1`` are single modules, told one by one."""
    row = replace(report.ops[0], time_s=1.0)
    names = [f"h.{layer}.{part}" for layer in range(3) for part in ("attn", "mlp")]
    parts = tree([replace(row, module=name) for name in (*names, "head.0", "head.1", "")])
    assert [(part.label, part.count, part.time_s) for part in parts] == [
        ("h.0…2", 3, 6.0),
        ("head", 1, 2.0),
        ("the model itself", 1, 1.0),
    ]
    assert [(part.label, part.count, part.time_s) for part in parts[0].parts] == [
        ("attn", 3, 3.0),
        ("mlp", 3, 3.0),
    ]
    assert [part.label for part in parts[1].parts] == ["0", "1"]


def test_layers_that_do_not_follow_each_other_are_listed(report: Report) -> None:
    def labels(*layers: int) -> list[str]:
        rows = [replace(report.ops[0], module=f"{layer}.{part}") for layer in layers for part in "ab"]
        return [part.label for part in tree(rows)]

    assert labels(9, 10, 11) == ["9…11"]
    assert labels(10, 2, 6) == ["2, 6, 10"]
    assert labels(0, 2, 4, 6, 8) == ["0, 2, …, 8"]


def test_the_batch_curve_holds_powers_of_two_that_fit_and_the_step_s_own() -> None:
    step = replace(STEP, batch=12)
    points = batch_curve(step, GPU, estimate())
    assert [point.batch for point in points] == [1, 2, 4, 8, 12, 16, 32, 64, 128]
    own = points[4]
    assert (own.time_s, own.memory_bytes) == (estimate().time_s, step.memory.peak_bytes)
    # 2 GB stay whatever the batch, 8 GB are for 12 samples.
    assert points[5].memory_bytes == pytest.approx(2e9 + 8e9 * 16 / 12)
    assert points[-1].memory_bytes <= GPU.memory_bytes < 2e9 + 8e9 * 256 / 12


def test_without_a_batch_there_is_no_curve(report: Report) -> None:
    assert batch_curve(replace(STEP, batch=0), GPU, estimate()) == ()
    assert "Other batches" not in _Outline(report.to_html()).text


def test_a_product_carries_how_it_is_cut_up() -> None:
    gemm = Gemm(4096, 1024, 512, batch=3)
    step = replace(STEP, ops=(StepOp(gemm, FORWARD, Site("a", "b")),))
    one = replace(estimate().ops[0], tile=(128, 256), waves=3.84, reason="aligned")
    priced = StepEstimate((one,), 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, gemm.flop, {})
    (row,) = build(step, GPU, priced, ()).ops
    assert (row.product, row.tile, row.waves, row.reason) == (
        (4096, 1024, 512, 3),
        (128, 256),
        3.84,
        "aligned",
    )


def test_a_profiled_run_is_beside_the_prediction(report: Report) -> None:
    """The first product took twice as long as predicted, the last as long; the others were not seen."""
    run = MeasuredStep(
        source="a run", steps=5, time_s=50e-3, low_s=49e-3, high_s=52e-3, profiled_time_s=60e-3, overhead=0.2,
        kernel_s=40e-3, kernels=100, busy_s=45e-3, launch_bound_s=6e-3, predicted_s=40e-3, predicted_gpu_s=38e-3,
        attributed_s=39e-3, tensor_core_s=20e-3, unknown_s=0.0, older_path_s=10e-3, memory_bound_s=4e-3,
        communication_s=0.0, exposed_communication_s=0.0,
        waits=(HostWait("cudaStreamSynchronize", "aten::item", "loss", "train.py:9", 3, 2e-3),),
    )  # fmt: skip
    slow, exact = (
        MeasuredOp(op.time_s * factor, ("nvjet_tst",), True, False, 1e12, 1e9, 0.5)
        for op, factor in ((report.ops[13], 0.5), (report.ops[15], 1.0))
    )
    ops = tuple(
        replace(op, provenance="measured", measured={13: slow, 15: exact}.get(index))
        for index, op in enumerate(report.ops)
    )
    page = _Outline(replace(report, ops=ops, measured=run).to_html())
    assert re.search(r"^time \w+\s50.0 ms\s49.0 to 52.0 ms over 5 steps", page.text, re.MULTILINE)
    assert "GPU busy\n75.0 %" in page.text
    assert "on Tensor Cores\n50.0 %\nof the kernels' time; 25.0 % in code of an older generation" in page.text
    assert "gemm 16384x50257x768 TN bf16 5.00 ms 10.0 ms" in page.text
    assert "loss train.py:9 cudaStreamSynchronize 3 2.00 ms" in page.text
    (data,) = map(json.loads, page.data)
    assert ["Tensor Cores", "used"] in data["rows"][1]["facts"]
    assert ["predicted", "5.00 ms"] in data["rows"][1]["facts"]
    # Equal times lie on the line, longer ones above it.
    at = next(i for i, (_, attrs) in enumerate(page.tags) if attrs.get("class") == "equal")
    line = {name: float(page.tags[at][1][name] or 0) for name in ("x1", "y1", "x2", "y2")}
    points = {
        attrs["data-row"]: attrs for tag, attrs in page.tags[at:] if tag == "circle" and "data-row" in attrs
    }
    assert set(points) == {"1", "3"}

    def above(attrs: dict[str, str | None]) -> float:
        x, y = float(attrs["cx"] or 0), float(attrs["cy"] or 0)
        slope = (line["y2"] - line["y1"]) / (line["x2"] - line["x1"])
        return line["y1"] + slope * (x - line["x1"]) - y

    assert abs(above(points["3"])) < 0.2
    assert above(points["1"]) > 10


def test_without_a_run_nothing_is_said_of_one(report: Report) -> None:
    assert "against measured" not in _Outline(report.to_html()).text
