"""From traces to reports: real steps on the CPU, with pretended kernels of an H200."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pretend_gpu import pretend
from profiled_net import Net
from tilefit.capture import capture
from tilefit.cost import MEASURED, estimate_step
from tilefit.cost.measured import MeasuredRun, MeasuredTime
from tilefit.cost.priced import priced
from tilefit.errors import TilefitError
from tilefit.ops import Gemm, Site, Step, StepOp
from tilefit.options import Selection
from tilefit.profiling import import_trace
from tilefit.profiling.attribution import attribute
from tilefit.profiling.chrome import read_events
from tilefit.profiling.joining import join
from tilefit.profiling.measurement import Live, measure
from tilefit.profiling.operations import Operations
from tilefit.profiling.perfetto import annotate
from tilefit.profiling.trace import collect, read_trace
from tilefit.report import loads, render

H200 = priced("h200")


@pytest.fixture(scope="module")
def captured() -> Step:
    return capture(Net(), torch.empty(32, 64), optimizer="sgd", loss=lambda y: y.square().mean(), name="Net")


def test_the_operations_of_a_trace_are_those_of_the_capture(trace_file: Path, captured: Step) -> None:
    """Every product, with its layout, gradient, module and type; and every operation of the layers."""
    steps = attribute(read_trace(trace_file))
    operations = Operations()
    units = [unit for call in steps[0].calls for unit in operations.units(call)]
    executed = [(u.op, u.phase, u.call.module) for u in units if isinstance(u.op, Gemm)]
    expected = [(e.op, e.phase, e.site.module) for e in captured.ops if isinstance(e.op, Gemm)]
    assert executed == expected
    known = join(captured.ops, units)
    missing = [unit.function for unit, index in zip(units, known, strict=True) if index is None]
    # The loss outside of the model and the plain optimizer loop of a CPU are not in the captured step.
    inside = {
        index for index, entry in enumerate(captured.ops) if entry.site.module and entry.phase != "optimizer"
    }
    assert inside <= set(known), missing


def test_a_trace_alone_gives_times_rates_and_modules(trace_file: Path) -> None:
    report = import_trace(trace_file)
    run = report.measured
    assert run is not None
    assert report.gpu == "h200"  # named in the trace
    assert run.steps == 2
    outside = {row.name for row in report.ops if not row.module and row.phase == "forward"}
    # The loss, the input, and the sum in the root module.
    assert outside == {"aten.pow", "aten.mean", "aten.ones_like", "aten.ones", "aten.add"}
    rows = [row for row in report.ops if row.kind == "gemm"]
    assert len(rows) == 6
    for row in rows:
        assert row.provenance == MEASURED
        assert row.time_s == pytest.approx(40e-6)
        assert row.measured is not None
        assert row.measured.tensor_core is True
        assert row.measured.flop_per_s == pytest.approx(row.flop / 40e-6)
    assert run.tensor_core_s == pytest.approx(6 * 40e-6)
    assert "dataflow" not in report.notes
    # It goes through every renderer, and comes back from JSON.
    assert loads(report.to_json()) == report
    for format in ("text", "markdown", "html"):
        assert render(report, format, show_all=True, ops=True)
    text = render(report, "text")
    assert "on Tensor Cores" in text


def test_times_are_medians_of_the_steps(trace_file: Path) -> None:
    document = json.loads(trace_file.read_text())
    boundary = max(
        e["ts"] for e in document["traceEvents"] if str(e.get("name", "")).startswith("ProfilerStep")
    )
    for event in document["traceEvents"]:
        if event.get("cat") == "kernel" and event["ts"] > boundary and "nvjet" in event["name"]:
            event["dur"] += 20
    report = measure(collect(document["traceEvents"], document), H200, Live("x")).report
    (row,) = {(r.time_s, r.low_s, r.high_s) for r in report.ops if r.kind == "gemm"}
    assert row == pytest.approx((50e-6, 40e-6, 60e-6))


def test_gains_follow_the_measured_times(trace_file: Path) -> None:
    """Ten times slower in its misaligned products, a step gains ten times as much when they are aligned."""
    events = list(read_events(trace_file.parent / "cpu.json"))
    # A step of the same layers, large enough for alignment to matter.
    inputs = torch.empty(8192, 4096, device="meta")
    large = capture(Net(4096, 10922), inputs, amp="bf16", optimizer="none", loss=lambda y: y.square().mean())

    def gain_s(product_us: float) -> float:
        slow = ("aten::mm", "aten::addmm")
        trace = collect(
            pretend(events, takes_us=lambda name: product_us if name in slow else 2.0, latency_us=0.0), {}
        )
        # The host takes no time, so that the GPU's is the step's.
        found = measure(trace, H200, Live("x", plain_s=(1e-9,)), large, Selection(select=("ALN",))).report
        return max(finding.gain_s for finding in found.findings)

    assert gain_s(1e5) == pytest.approx(10 * gain_s(1e4), rel=0.02)


def test_a_measured_step_takes_the_measured_wall_time(trace_file: Path) -> None:
    report = measure(read_trace(trace_file), H200, Live("x", plain_s=(0.004, 0.005, 0.006))).report
    assert report.measured is not None
    assert report.measured.time_s == pytest.approx(0.005)
    assert report.measured.overhead is not None
    assert report.step.time_s == pytest.approx(0.005, rel=0.01)


def test_a_run_that_launches_do_not_explain_is_told_to_be_longer(trace_file: Path) -> None:
    trace = read_trace(trace_file)
    waited = measure(trace, priced("h200"), Live("x", plain_s=(10.0, 10.0))).report
    assert waited.step.time_s < 1
    assert any(note.startswith("A step of the run took 10.0 s, of which") for note in waited.notes)
    explained = measure(trace, priced("h200"), Live("x", plain_s=(1e-3, 1e-3))).report
    assert not any("A step of the run took" in note for note in explained.notes)


def test_unlike_operations_are_corrected_by_their_own_kind() -> None:
    """A product of the same layer errs as that layer's did; one of another layer as all products did."""
    entries = tuple(StepOp(Gemm(4096, 4096, 4096), "forward", Site(name)) for name in "ab")
    step = Step(entries)
    predicted = estimate_step(step, H200).ops
    times = [
        MeasuredTime(factor * p.time_s, 0.0, 1.0) for factor, p in zip((2.0, 4.0), predicted, strict=True)
    ]
    run = MeasuredRun(step, times, predicted)
    other = Gemm(4096, 4096, 2048)
    changed = Step((entries[0], StepOp(other, "forward", Site("b")), StepOp(other, "forward", Site("c"))))
    plain = estimate_step(changed, H200).ops
    as_run = replace(H200, run=run)
    known, same, unlike = (estimate.time_s for estimate in estimate_step(changed, as_run).ops)
    assert estimate_step(changed, H200).ops == plain
    assert known == pytest.approx(2.0 * plain[0].time_s)
    assert same == pytest.approx(4.0 * plain[1].time_s)
    assert unlike == pytest.approx(3.0 * plain[2].time_s)


class TestTotals:
    """Shares of a step whose kernels are placed by hand; microseconds."""

    def run(self, kernels: list[tuple[str, float, float, float, int]], gpu: str = "h200") -> Any:
        """Kernels as name, launch, start, time, stream; in one operation each."""
        events: list[dict[str, Any]] = [
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": "ProfilerStep#0",
                "pid": 1,
                "tid": 1,
                "ts": 0,
                "dur": 990,
            }
        ]
        for number, (name, launch, start, took, stream) in enumerate(kernels, 1):
            host = {"ph": "X", "pid": 1, "tid": 1}
            args = {"correlation": number}
            call = {"name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": launch, "dur": 1, "args": args}
            ran = {"name": name, "cat": "kernel", "ts": start, "dur": took, "pid": 0, "tid": stream}
            events += [
                {**host, "name": "aten::mul", "cat": "cpu_op", "ts": launch - 1, "dur": 3},
                {**host, **call},
                {"ph": "X", **ran, "args": {**args, "device": 0, "stream": stream}},
            ]
        return measure(collect(events, {}), priced(gpu), Live("x")).report.measured

    def test_idle_time_is_the_hosts_where_the_launch_came_late(self) -> None:
        run = self.run([("a", 10, 100, 100, 7), ("b", 300, 310, 100, 7), ("c", 320, 420, 100, 7)])
        assert run.busy_s == pytest.approx(300e-6)
        # Before the first kernel, launched at 10, and between 200 and 310; not the 10 µs before the last.
        assert run.launch_bound_s == pytest.approx(210e-6)

    def test_communication_is_exposed_where_nothing_else_runs(self) -> None:
        run = self.run([("a", 1, 100, 100, 7), ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 5, 150, 100, 20)])
        assert run.communication_s == pytest.approx(100e-6)
        assert run.exposed_communication_s == pytest.approx(50e-6)

    def test_tensor_cores_old_code_and_what_names_do_not_tell(self) -> None:
        old = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x6_tn_align1>(P)"
        kernels = [
            ("nvjet_tst_128x128_64x4_1x2_h_bz_TNT", 1, 10, 30, 7),
            (old, 5, 50, 20, 7),
            ("mine", 6, 90, 10, 7),
        ]
        run = self.run(kernels)
        assert (run.tensor_core_s, run.older_path_s, run.unknown_s) == pytest.approx((50e-6, 20e-6, 10e-6))
        assert self.run(kernels, "a100-sxm-80gb").older_path_s == 0


def test_the_exported_trace_shows_modules_and_findings(
    trace_file: Path, tmp_path: Path, captured: Step
) -> None:
    trace = read_trace(trace_file)
    found = measure(trace, H200, Live("x"), captured, Selection(min_gain=0.0))
    assert found.report.findings
    path = tmp_path / "out.json.gz"
    annotate(trace_file, found.steps, found.report, path)
    header: dict[str, Any] = {}
    events = list(read_events(path, header.__setitem__))
    assert header["deviceProperties"][0]["name"] == "NVIDIA H200"
    ours = [event for event in events if event.get("cat") == "tilefit"]
    assert len(events) > len(ours) > 0
    kernels = [event for event in events if event.get("cat") == "kernel"]
    first, last = min(e["ts"] for e in kernels), max(e["ts"] + e["dur"] for e in kernels)
    named = {event["name"] for event in ours}
    assert "aten::addmm" in named
    assert any(name.startswith("up ") for name in named)
    assert any(name.startswith(found.report.findings[0].code) for name in named)
    operations = [event for event in ours if "phase" in event["args"]]
    # Times are kept in whole nanoseconds, a thousandth of the trace's unit.
    assert all(first - 0.001 <= event["ts"] <= last for event in operations)


def test_a_trace_of_the_cpu_alone_is_refused(trace_file: Path) -> None:
    with pytest.raises(TilefitError, match="nothing in this trace ran on a GPU") as caught:
        import_trace(trace_file.parent / "cpu.json")
    assert "ProfilerActivity.CUDA" in caught.value.hint


def test_without_shapes_the_report_says_what_is_missing(trace_file: Path, tmp_path: Path) -> None:
    document = json.loads(trace_file.read_text())
    for event in document["traceEvents"]:
        event.get("args", {}).pop("Input Dims", None)
    path = tmp_path / "bare.json"
    path.write_text(json.dumps(document))
    report = import_trace(path)
    assert any("record_shapes=True" in note for note in report.notes)
    assert report.measured is not None
    assert report.measured.tensor_core_s > 0


def test_damaged_events_are_told(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "dur": 3}]}')
    with pytest.raises(TilefitError, match="'ts'"):
        import_trace(path)
