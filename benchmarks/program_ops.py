"""Whole programs: does what is recorded without a GPU equal what really runs on one?

On a GPU each program runs for a few steps; of its third step the products, convolutions, attentions and
recurrent layers are listed by shape, type, layout and count, with all kernels, copies and waits of the host,
each kernel with the operation that launched it, and the next steps are timed. Without a GPU, ``--compare``
captures the same step of the same programs and says where they differ, function by function.

    python benchmarks/program_ops.py --rows rows.jsonl --seconds 300      # on a GPU; appends a row a program
    python benchmarks/program_ops.py --rows benchmarks/results/program_ops_h200.jsonl.gz --compare

Any other program is named by its file and its arguments, ``"path/main.py --epochs 1"``; its data are made up.
"""

from __future__ import annotations

import argparse
import faulthandler
import fcntl
import gzip
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES, OWN = ROOT / "examples" / "programs", ROOT / "benchmarks" / "programs"
#: Program, its arguments, and whether its data are made up.
PROGRAMS: dict[str, tuple[Path, tuple[str, ...], bool]] = {
    "speech": (EXAMPLES / "speech.py", (), False),
    "lightning": (EXAMPLES / "lightning.py", (), True),
    "functions": (OWN / "functions.py", (), False),
    "language_model": (EXAMPLES / "language_model.py", (), True),
    "image_transformer": (OWN / "image_transformer.py", (), False),
    "words": (OWN / "words.py", (), False),
    "graph": (EXAMPLES / "graph.py", (), False),
    "recommender": (EXAMPLES / "recommender.py", (), False),
    "reinforcement": (EXAMPLES / "reinforcement.py", (), False),
    "gan": (EXAMPLES / "gan.py", (), True),
    "diffusion": (EXAMPLES / "diffusion.py", (), True),
    "trainer": (EXAMPLES / "trainer.py", (), True),
    "accelerated": (EXAMPLES / "accelerated.py", (), True),
    "contrastive": (OWN / "contrastive.py", (), False),
    "mixture": (OWN / "mixture.py", (), False),
}


def program(name: str) -> tuple[Path, tuple[str, ...], bool]:
    """One of the table, or any file with its arguments, whose data are made up."""
    if name in PROGRAMS:
        return PROGRAMS[name]
    path, *arguments = shlex.split(name)
    return Path(path), tuple(arguments), True


#: Steps before the one that is listed, and before those that are timed; how many are timed.
SKIP, BEFORE, TIMED = 2, 4, 8
#: Seconds after which a program is given up, its imports apart.
LONGEST_S = 40.0
#: Functions that the device runs, by what the capture calls them.
_SAME = {
    "aten._cudnn_rnn": "aten.recurrent",
    "aten._cudnn_rnn_backward": "aten.recurrent_backward",
    **{f"aten.{kind}": "aten.recurrent" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{
        f"aten.{kind}_backward": "aten.recurrent_backward" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    },
    "aten.cudnn_batch_norm": "aten.native_batch_norm",
    "aten.cudnn_batch_norm_backward": "aten.native_batch_norm_backward",
    **{
        f"aten._scaled_dot_product_{kind}_attention{end}": f"aten.scaled_dot_product_attention{end}"
        for kind in ("cudnn", "flash", "efficient", "fused")
        for end in ("", "_backward")
    },
}
#: How the trace tells the operations that are marked for the benchmark.
_MARK = "tilefit "
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


# ---- on a GPU --------------------------------------------------------------------------------------


class Observed:
    """What one program does; written when its timed steps are done, and the process ends."""

    def __init__(self, name: str, rows: Path, timed: int) -> None:
        import torch
        from capture_vs_cuda import Witness
        from torch.profiler import ProfilerActivity, profile, record_function

        class Watching(Witness):
            """Also counts all operations by name, and marks each in the trace."""

            def __init__(self) -> None:
                super().__init__()
                self.names: Counter[str] = Counter()

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.names[str(func)] += 1
                with record_function(f"{_MARK}{func} {_operands(args)}"):
                    return super().__torch_dispatch__(func, types, args, kwargs)

        self.torch, self.name, self.timed = torch, name, timed
        self.file = rows.open("a")  # before programs are kept from writing
        self.gpu = torch.cuda.is_available()
        self.witness = Watching()
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.gpu
        self.profile = profile(activities=kinds)
        self.row: dict[str, Any] = {}

    def begin(self) -> None:
        """The step that is listed begins."""
        self.wait()
        self.profile.start()
        self.witness.__enter__()

    def end(self) -> None:
        """It ends."""
        self.witness.__exit__(None, None, None)
        self.wait()
        self.profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            self.profile.export_chrome_trace(str(trace))
            self.row = summary(json.loads(trace.read_text())["traceEvents"])
        self.row |= {"seen": dict(self.witness.seen), "aten": dict(self.witness.names)}

    def begin_timed(self) -> None:
        """The steps that are timed begin."""
        self.wait()
        self.began = time.perf_counter()

    def end_timed(self) -> None:
        """They end, and the program with them."""
        self.wait()
        step_s = (time.perf_counter() - self.began) / self.timed
        torch = self.torch
        self.write(
            gpu=torch.cuda.get_device_name() if self.gpu else "none",
            driver=driver() if self.gpu else "none",
            date=time.strftime("%Y-%m-%d"),
            torch=torch.__version__,
            step_s=step_s,
            peak_bytes=torch.cuda.max_memory_allocated() if self.gpu else 0,
        )

    def write(self, **values: Any) -> None:
        """Append the row and leave."""
        self.file.write(json.dumps({"program": self.name, **values, **self.row}) + "\n")
        self.file.flush()
        os._exit(0)

    def wait(self) -> None:
        """Until the GPU is done."""
        if self.gpu:
            self.torch.cuda.synchronize()


def driver() -> str:
    """The GPU's driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]


def summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Kernels, copies, and calls that wait, of a trace in Chrome's format, by name.

    The calls are given with the innermost operation of PyTorch's that made them; the two of the benchmark's
    own, before and after, are in no operation.
    """
    spans = [each for each in events if each.get("ph") == "X"]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for each in spans:
        kinds.setdefault(each.get("cat", ""), []).append(each)
    calls = kinds.get("cpu_op", [])
    waits: Counter[str] = Counter()
    for each in kinds.get("cuda_runtime", []):
        if each["name"] in _WAITS:
            around = [
                call
                for call in calls
                if call["tid"] == each["tid"] and call["ts"] <= each["ts"] <= call["ts"] + call["dur"]
            ]
            inner = min(around, key=lambda call: call["dur"])["name"] if around else ""
            waits[f"{each['name']} {inner}".strip()] += 1
    kernels = kinds.get("kernel", [])
    return {
        "kernels": dict(Counter(each["name"][:120] for each in kernels)),
        "calls": launched(spans, kernels),
        "kernels_s": sum(each["dur"] for each in kernels) * 1e-6,
        "copies": dict(Counter(each["name"] for each in kinds.get("gpu_memcpy", []))),
        "sets": len(kinds.get("gpu_memset", [])),
        "waits": dict(waits),
    }


def launched(spans: list[dict[str, Any]], kernels: list[dict[str, Any]]) -> list[list[Any]]:
    """``[operation and operands, its kernels, their microseconds]`` of each marked operation that launched
    some, in order.

    Marks never lie within each other, and only one thread launches at a time: that of the backward pass while
    the program's waits for it.
    """
    spans = sorted(spans, key=lambda each: float(each["ts"]))
    marks = [e for e in spans if e.get("cat") == "user_annotation" and e["name"].startswith(_MARK)]
    starts = [float(each["ts"]) for each in marks]
    launches = {
        e["args"].get("correlation"): float(e["ts"])
        for e in spans
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    calls: dict[int, list[Any]] = {}
    for kernel in sorted(kernels, key=lambda each: float(each["ts"])):
        at = launches.get(kernel["args"].get("correlation"), -1.0)
        index = bisect_right(starts, at) - 1
        inside = index >= 0 and at <= starts[index] + float(marks[index]["dur"])
        name = marks[index]["name"].removeprefix(_MARK) if inside else ""
        call = calls.setdefault(index if inside else -1, [name, [], 0.0])
        call[1].append(kernel["name"].removeprefix("void ")[:60])
        call[2] = round(call[2] + kernel["dur"], 2)
    return list(calls.values())


def _operands(args: Any) -> str:
    """Shapes and element types of an operation's tensors, and its numbers."""
    shown = []
    for each in args:
        if hasattr(each, "stride"):
            strides = "" if each.is_contiguous() else f"/{','.join(map(str, each.stride()))}"
            shown.append(f"{str(each.dtype)[6:]}[{','.join(map(str, each.shape))}{strides}]")
        elif isinstance(each, (list, tuple)) and each and hasattr(each[0], "stride"):
            shown.append(f"{len(each)} x {max(part.numel() for part in each)}")
        else:
            shown.append(str(each)[:24] if isinstance(each, (int, float, str)) else type(each).__name__)
    return " ".join(shown)[:240]


def run_program(name: str, rows: Path, timed: int) -> None:
    """Run a program in this process until all is known of it."""
    import runpy

    from tilefit.capture.program.contained import contained
    from tilefit.capture.program.fake_data import pretrained
    from tilefit.capture.program.finding import Listener, StepFinder

    path, arguments, fake = program(name)
    observed = Observed(name, rows, timed)
    listed, following = Listener(), Listener()
    listed.begins, listed.ends = observed.begin, observed.end
    following.begins, following.ends = observed.begin_timed, observed.end_timed
    finders = StepFinder(SKIP, 1, listed), StepFinder(BEFORE, timed, following)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    random.seed(0)
    if name == "speech":
        seen_whole()
    with ExitStack() as stack:
        turn = stack.enter_context(rows.with_suffix(".turn").open("w"))
        import_libraries(path)
        fcntl.lockf(turn, fcntl.LOCK_EX)  # the imports of all overlap; the rest is one by one
        faulthandler.dump_traceback_later(LONGEST_S, exit=True)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if fake:
            # Weights that nobody has set may be anything, and trainers wait otherwise for a loss that is NaN.
            pretrained._without_initialization = nullcontext
            stack.enter_context(contained(folder, fake=True))
        for finder in finders:
            stack.enter_context(finder.watching())
        try:
            runpy.run_path(str(path), run_name="__main__")
            observed.write(error="it ended")
        except BaseException as error:  # noqa: BLE001 - a row of the result
            import traceback

            traceback.print_exc()
            observed.write(error=f"{type(error).__name__}: {error}"[:500])


def import_libraries(path: Path) -> None:
    """What a program will import."""
    text = path.read_text()
    if "transformers" in text:
        import transformers

        with suppress(ImportError):
            _ = transformers.Trainer
    if "torchvision" in text or "lightning" in text:
        from tilefit.capture.torchvision_import import tolerated

        with tolerated():
            import torchvision  # noqa: F401
    if "pytorch_lightning" in text:
        try:
            import pytorch_lightning  # noqa: F401
        except ImportError:
            import lightning.pytorch

            sys.modules["pytorch_lightning"] = lightning.pytorch


def seen_whole() -> None:
    """PyTorch's loss takes another way where anything watches it, and fails there for lengths on the CPU."""
    import torch
    from torch.profiler import record_function
    from torch.utils._python_dispatch import _disable_current_modes

    ctc_loss = torch.ctc_loss

    def unseen(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"{_MARK}aten._ctc_loss.default {_operands(args)}"), _disable_current_modes():
            return ctc_loss(*args, **kwargs)

    torch.ctc_loss = torch.nn.functional.torch.ctc_loss = unseen


def observe(names: list[str], rows: Path, seconds: float, timed: int) -> None:
    """A row for each program, each in a process of its own; they start together and run one by one."""
    began = time.perf_counter()
    logs = {name: tempfile.TemporaryFile("w+") for name in names}  # noqa: SIM115
    running = {}
    for name in names:
        command = [sys.executable, __file__, "--child", name, "--rows", str(rows), "--timed", str(timed)]
        running[name] = subprocess.Popen(
            command, stdout=logs[name], stderr=logs[name], start_new_session=True
        )
        time.sleep(0.3)  # about in the order of the list
    while running and (left := seconds - (time.perf_counter() - began)) > 0:
        time.sleep(min(0.2, left))
        for name in [name for name, child in running.items() if child.poll() is not None]:
            del running[name]
            found = rows.read_text().splitlines() if rows.exists() else []
            row = next(
                (r for r in map(json.loads, reversed(found)) if r["program"] == name), {"error": "no row"}
            )
            told = row.get("error") or (
                f"{sum(row['kernels'].values())} kernels, {sum(row['waits'].values())} waits, "
                f"{1e3 * row['step_s']:.2f} ms a step ({time.perf_counter() - began:.0f} s so far)"
            )
            print(f"{name}: {told}", flush=True)
            if "error" in row:
                logs[name].seek(0)
                print(logs[name].read()[-3000:], flush=True)
    for name, child in running.items():
        os.killpg(child.pid, signal.SIGKILL)
        logs[name].seek(0)
        print(f"{name}: no time left\n{logs[name].read()[-1000:]}", flush=True)


# ---- without one -----------------------------------------------------------------------------------


def recorded(name: str, gpu: str) -> dict[str, Any]:
    """The same of the captured step, and its price."""
    from capture_vs_cuda import captured

    from tilefit.assessment import Assessment
    from tilefit.capture.child import capture_program_in_child
    from tilefit.cost.launch import launched
    from tilefit.cost.priced import resolve
    from tilefit.options import ProgramOptions

    path, arguments, fake = program(name)
    options = ProgramOptions(str(path), arguments, skip=SKIP, fake_data=fake)
    step = capture_program_in_child(options, gpu, timeout_s=600)
    assert step.program is not None
    priced = resolve(gpu)[0]
    estimate = Assessment(step, priced).context.estimate
    return {
        "seen": dict(captured(step)),
        "kernels": sum(launched(e, priced) for e in step.ops),
        "launched": by_function((e.name, launched(e, priced)) for e in step.ops),
        "us": by_function((e.name, 1e6 * o.time_s) for e, o in zip(step.ops, estimate.ops, strict=True)),
        "waits": dict(Counter(f"{e.kind} {e.name}" for e in step.program.events if e.blocks)),
        "copies": dict(Counter(e.kind for e in step.program.events)),
        "aten": dict(Counter(entry.name for entry in step.ops)),
        "step_s": estimate.time_s,
        "low_s": estimate.low_s,
        "high_s": estimate.high_s,
        "kernels_s": estimate.gpu_time_s,
    }


def difference(real: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Where a program's two rows differ."""
    theirs, mine = Counter(real["seen"]), Counter(ours["seen"])
    within = sum(n for name, n in real["copies"].items() if "DtoD" in name)
    kernels, waits = sum(real["kernels"].values()) + within, sum(real["waits"].values())
    own = sum(n for name, n in real["waits"].items() if name == "cudaDeviceSynchronize")
    return {
        "program": real["program"],
        "operations": sum(theirs.values()),
        "equal": theirs == mine,
        "only_captured": dict(mine - theirs),
        "only_executed": dict(theirs - mine),
        "kernels": [kernels, ours["kernels"]],
        "kernels_off": ours["kernels"] / kernels - 1 if kernels else None,
        "waits": [waits - own, sum(ours["waits"].values())],
        "waits_executed": real["waits"],
        "waits_captured": ours["waits"],
        "step_ms": [1e3 * real["step_s"], 1e3 * ours["step_s"]],
        "kernels_ms": [1e3 * real["kernels_s"], 1e3 * ours["kernels_s"]],
        "launches_off": _off(
            by_function((n.split()[0], len(k)) for n, k, *_ in real.get("calls", []) if n), ours["launched"]
        ),
        "us_off": _off(
            by_function((n.split()[0], us[0]) for n, _, *us in real.get("calls", []) if n and us), ours["us"]
        ),
        "aten_captured": ours["aten"],
        "aten_executed": real["aten"],
    }


def by_function(each: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Kernels or microseconds by the name of the function, without its overload."""
    sums: dict[str, float] = {}
    for name, value in each:
        function = _SAME.get(short := ".".join(name.split(".")[:2]), short).rstrip("_")
        sums[function] = sums.get(function, 0) + value
    return sums


def _off(theirs: dict[str, float], ours: dict[str, float]) -> dict[str, list[float]]:
    """Functions of which both do not have as much, by how much."""
    both = {name: [round(all.get(name, 0), 1) for all in (theirs, ours)] for name in {*theirs, *ours}}
    off = {name: counts for name, counts in both.items() if counts[0] != counts[1]}
    return dict(sorted(off.items(), key=lambda item: -abs(item[1][0] - item[1][1])))


def compare(names: list[str], rows: Path, gpu: str, out: Path | None) -> None:
    """Capture what was observed, and say where they differ."""
    result = []
    text = gzip.decompress(rows.read_bytes()).decode() if rows.suffix == ".gz" else rows.read_text()
    for line in text.splitlines():
        real = json.loads(line)
        if real["program"] not in names or "error" in real:
            continue
        row = difference(real, recorded(real["program"], gpu))
        result.append(row)
        shown = {key: value for key, value in row.items() if not key.startswith("aten")}
        print(json.dumps(shown), flush=True)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    off = [abs(row["kernels_off"]) for row in result if row["kernels_off"] is not None]
    times = [abs(row["kernels_ms"][1] / row["kernels_ms"][0] - 1) for row in result if row["kernels_ms"][0]]
    print(
        f"{sum(row['equal'] for row in result)} of {len(result)} record the same products; host waits "
        f"agree in {sum(row['waits'][0] == row['waits'][1] for row in result)}; kernels are off by "
        f"{statistics.median(off) if off else float('nan'):.1%} in the median, the GPU's time by "
        f"{statistics.median(times) if times else float('nan'):.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "programs", nargs="*", default=list(PROGRAMS), help=f"{', '.join(PROGRAMS)}, or files"
    )
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--timed", type=int, default=TIMED)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_program(options.child, options.rows, options.timed)
    elif options.compare:
        compare(options.programs or list(PROGRAMS), options.rows, options.gpu, options.out)
    else:
        observe(options.programs or list(PROGRAMS), options.rows, options.seconds, options.timed)


if __name__ == "__main__":
    main()
