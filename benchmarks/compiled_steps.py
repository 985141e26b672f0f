"""Measure many models' compiled training steps within a short time on a GPU.

    PYTHONPATH=src python benchmarks/compiled_steps.py --out DIR --budget-s 560

Compiling takes most of it and needs the host alone, so every model has a process of its own, which compiles
and then waits; one after another they are timed, while nothing else runs; in rounds, where not all fit. The
GPU is one process's at a time where something is timed: the compiler's own choices, too, are made by timing.
Under ``--out``, as soon as each is there: ``rows.jsonl``, the rows of ``whole_steps.py --compiled`` with the
graphs and breaks, what Inductor scheduled and the same step run eagerly; ``code.tar.gz``, the code that
Inductor wrote. Models with a row in one of ``--done`` are left out; a failure is a row too, and not done.

    PYTHONPATH=src python benchmarks/compiled_steps.py --pack rows.jsonl --about '{…}' --out RESULT.json
    PYTHONPATH=src python benchmarks/whole_steps.py --measured RESULT.json

What a host takes varies by a quarter within seconds, not alike in the thread of the forward pass and in that
of the backward pass, so a reference step a second before or after says little. With ``--alternate-s 2`` a
model and the reference take a few steps each in turn for two seconds: these are the turns of its row.

These need no GPU: the first keeps of such rows what is read again, the second compares with predictions.

    PYTHONPATH=src python benchmarks/compiled_steps.py --predict --gpu h200 --only held_models
    PYTHONPATH=src python benchmarks/compiled_steps.py --compare RESULT.json [OTHER PROCESSES.json] --gpu h200

The first wrote ``results/compiled_steps_predicted*.json``, one for each GPU, before those models were
measured anywhere; the second says what became of it, by the median over the turns.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from whole_steps import COMPILED, MODELS, PADDED, PREDICTED, Measured, Run, predicted, runs

from tilefit.cost.launch import REFERENCE_STEP_S
from tilefit.cost.priced import priced
from tilefit.measure.launch import reference_step

#: By GPU.
FORESEEN = {
    name: Path(__file__).parent / "results" / f"compiled_steps_predicted{suffix}.json"
    for name, suffix in (("h100-sxm", ""), ("h200", "_h200"))
}
#: Hosts that predictions are written for, by how long they take to launch; between them lines are drawn.
SCALES = (0.6, 0.8, 1.0, 1.25, 1.6, 2.0)
RECORDED = Path(__file__).parent / "results" / "whole_steps_compiled.json"
#: Where processes keep what they compile, and the lock of the GPU.
WORK = Path(os.environ.get("TMPDIR", "/tmp")) / "compiled_steps"
#: Kernels of these differ from layer to layer: each has compiler threads beside its own.
WIDE = (
    "densenet121",
    "efficientnet_b0",
    "ghostnet",
    "hrnet",
    "regnet",
    "mobilevit",
    "segformer",
    "xcit",
    "cait",
    "matches",
)
#: Seconds that timing a model is taken to need, before any was timed.
TIMING_S = 5.0
#: And its last turn, with what the profiler says.
LAST_S = 7.0
#: A turn that takes longer has failed.
MOST_S = 10.0
STEPS_BEFORE = 3
#: Steps that follow each other in a turn among those of the reference.
BACK_TO_BACK = 8
#: Seconds that a process is waited for at most once it is told to go.
PATIENCE_S = 20.0
#: Parameters whose optimizer is compiled: more take too long.
MOST_COMPILED = 64
READY = "READY"
TURN, LAST = "turn", "last"
ROW = "ROW "


def folder(label: str) -> Path:
    return WORK / "".join(c if c.isalnum() else "_" for c in label)


# ---- a process of a model ----------------------------------------------------------------------


@contextlib.contextmanager
def gpu_to_itself() -> Iterator[None]:
    with (WORK / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def called_after(says: str) -> str:
    """Say that one is ready, and so on; what one is told then."""
    print(READY, says, flush=True)
    if not (called := sys.stdin.readline()):
        sys.exit("Whoever started this is gone.")  # or it would hold the GPU's lock against others
    return called.strip()


@contextlib.contextmanager
def when_called(says: str = "") -> Iterator[bool]:
    """Say that all is compiled, wait for the turn, and have the GPU within the block: is it the last turn?"""
    called = called_after(says)
    gc.freeze()  # or the collector looks through all of this again and again while steps are timed
    with gpu_to_itself():
        yield called == LAST


def lock_benchmarks() -> None:
    """Inductor's own timing holds the GPU's lock."""
    from torch._inductor.runtime import benchmarking

    depth = threading.local()

    def locked(timed: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if getattr(depth, "held", False):
                return timed(*args, **kwargs)
            with gpu_to_itself():
                depth.held = True
                try:
                    return timed(*args, **kwargs)
                finally:
                    depth.held = False

        return run

    for kind in [each for each in vars(benchmarking).values() if isinstance(each, type)]:
        for name in ("benchmark_gpu", "benchmark_many_gpu"):
            if name in vars(kind):
                setattr(kind, name, locked(getattr(kind, name)))


def note_schedules(found: list[dict[str, Any]]) -> None:
    """Note the kernels of every graph that Inductor schedules, as ``inductor_kernels.py`` does."""
    from inductor_kernels import kernel
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.sizevars import SizeVarAllocator
    from torch._inductor.virtualized import V

    if not hasattr(SizeVarAllocator, "optimization_hint"):  # its name from 2.12 on
        SizeVarAllocator.optimization_hint = SizeVarAllocator.size_hint
    codegen = Scheduler.codegen

    def noted(scheduler: Any) -> Any:
        kernels: collections.Counter[tuple[Any, ...]] = collections.Counter()
        for node in scheduler.nodes:
            try:
                each = kernel(node)
            except Exception as error:  # noqa: BLE001 - what it says of itself is not what is measured
                each = {"failed": repr(error)[:200]}
            if each:
                kernels[tuple(each.values())] += 1
        found.append(
            {
                "backward": bool(V.graph.is_backward),
                "channels_last": bool(getattr(V.graph, "layout_opt", False)),
                "kernels": [[*key, count] for key, count in kernels.items()],
            }
        )
        return codegen(scheduler)

    Scheduler.codegen = noted


def patiently(steps: Callable[[], None]) -> None:
    """Others' activations may fill the GPU while everything is compiled."""
    for wait_s in (10, 20, 0):
        try:
            return steps()
        except torch.OutOfMemoryError:
            if not wait_s:
                raise
            gc.collect()
            torch.cuda.empty_cache()
            time.sleep(wait_s)
    return None


def times(model: Measured, turns: int) -> None:
    """Time a model that is warm; fewer turns where the GPU limits the step."""
    for _ in range(turns):
        model.turn()
        if model.turns[-1]["wall_ms"] > 1.5 * sum(model.turns[-1]["host_ms"]):
            break


def eager(model: Measured, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of the same model without the compiler, of these turns and another."""
    compiled = model.run, model.turns, model.once
    model.run, model.turns = model.model, turns
    try:
        times(model, 1)
        model.once = {}
        return model.row()
    except Exception as error:  # noqa: BLE001 - the compiled row is what counts
        return {"failure": repr(error)[:300]}
    finally:
        model.run, model.turns, model.once = compiled


def host_profile(model: Measured) -> list[tuple[str, int, float]]:
    """What PyTorch's profiler names on the host in one step: name, times, microseconds; the longest."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model.step()
        model.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiler.events():
        into = found.setdefault(event.name[:80], [0, 0.0])
        into[0] += 1
        into[1] += event.time_range.elapsed_us()
    longest = sorted(found.items(), key=lambda item: -item[1][1])[:60]
    return [(name, int(times), round(us, 1)) for name, (times, us) in longest]


def optimizers(model: Measured) -> Callable[[], dict[str, float]]:
    """Compile the step of a model's optimizer; what is returned tells the host's milliseconds of a step of
    several optimizers, and of ``zero_grad``."""
    parameters = [*model.model.parameters()]
    made = {
        "foreach": torch.optim.AdamW(parameters, lr=1e-6, foreach=True),
        "fused": torch.optim.AdamW(parameters, lr=1e-6, fused=True),
        "sgd": torch.optim.SGD(parameters, lr=1e-6, momentum=0.9),
    }
    steps = {name: each.step for name, each in made.items()}
    if len(parameters) <= MOST_COMPILED:
        steps["compiled"] = torch.compile(
            torch.optim.AdamW(parameters, lr=1e-6, capturable=model.device == "cuda").step
        )

    def graded() -> None:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        model.synchronize()

    def spent_ms(call: Callable[[], Any]) -> float:
        graded()
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    def timed() -> dict[str, float]:
        calls = {**steps, "zero_grad": made["fused"].zero_grad}
        return {name: statistics.median(spent_ms(call) for _ in range(15)) for name, call in calls.items()}

    for step in steps.values():
        spent_ms(step)
    return timed


def alternate(model: Measured, seconds: float) -> None:
    """Turns of a reference step's repeats and a few steps, one with an idle GPU before it and some back to
    back, for so long."""
    reference = reference_step(torch.device(model.device))

    def spent_ms(step: Callable[[], Any], times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            step()
        model.synchronize()
        return 1e3 * (time.perf_counter() - start) / times

    def reference_ms() -> float:
        spent_ms(reference, 1)
        return spent_ms(reference, 3)

    spent_ms(model.step, 4)
    found = [reference_ms()]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(model.turns) < 2:
        passed: list[float] = []
        wall_ms = spent_ms(lambda into=passed: into.extend(model.step()), 1)
        sustained_ms = spent_ms(model.step, BACK_TO_BACK)
        found.append(reference_ms())
        model.turns.append(
            {
                "wall_ms": wall_ms,
                "sustained_ms": sustained_ms,
                "host_ms": [1e3 * (b - a) for a, b in pairwise(passed)],
                "reference_ms": found[-2],
                "after_ms": found[-1],
            }
        )


def warmed(run: Run, device: str) -> tuple[Measured, float]:
    """A model that is compiled and has taken its first steps, and the seconds that this took."""
    lock_benchmarks()
    start = time.perf_counter()
    model = Measured(run, device)

    def warm() -> None:
        for _ in range(STEPS_BEFORE):
            model.step()
        model.synchronize()

    patiently(warm)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return model, time.perf_counter() - start


def work_alternating(run: Run, device: str, seconds: float, looks: bool) -> None:
    """Compile, say so, and when called print a row of turns in turn with the reference's."""
    model, compile_s = warmed(run, device)
    with when_called():
        alternate(model, seconds)
        if looks:
            model.look_inside()
    row = {"model": run.label, **run.sizes, "arguments": run.arguments, **model.row()}
    print(ROW + json.dumps({**row, "compile_s": round(compile_s, 1)}), flush=True)


def work(run: Run, device: str, turns: int) -> None:
    """Compile, say so, take a turn for each line, and print the row after the last."""
    from torch._dynamo.utils import counters

    graphs: list[dict[str, Any]] = []
    note_schedules(graphs)
    model, compile_s = warmed(run, device)
    of_optimizers = optimizers(model) if run.label.endswith("parameters") else None
    apart: list[dict[str, Any]] = []
    last = False
    while not last:
        with when_called() as last:
            if not last:
                times(model, 1)
                eager(model, apart)
                continue
            times(model, turns)
            row_of_optimizers = of_optimizers() if of_optimizers else None
            beside = eager(model, apart)  # before the profiler, which slows the host from then on
            model.look_inside()
            found = host_profile(model)
            row = {"model": run.label, **run.sizes, "arguments": run.arguments, **model.row()}
            row["compile_s"] = round(compile_s, 1)
            row["unique_graphs"] = counters["stats"]["unique_graphs"]
            row["graph_breaks"] = {reason[:200]: n for reason, n in counters["graph_break"].items()}
            row["graphs"] = graphs
            row["host_profile"] = found
            row["optimizers_ms"] = row_of_optimizers
            print(ROW + json.dumps({**row, "eager": beside}), flush=True)
            model.run = model.model
            model.look_inside()
            beside |= model.once
    print(ROW + json.dumps({**row, "eager": beside}), flush=True)


# ---- the process that starts them ----------------------------------------------------------------


class Worker:
    """A model's process, and what it has said.

    Args:
        command: The script and its arguments; ``--worker LABEL`` is added.
    """

    def __init__(self, label: str, command: list[str]) -> None:
        self.label = label
        #: What it said when it was ready last.
        self.said = ""
        self.row: dict[str, Any] | None = None
        self.ready = threading.Event()
        self.ended = threading.Event()
        self.started = time.perf_counter()
        path = folder(label)
        path.mkdir(parents=True, exist_ok=True)
        self.log = path / "log"
        wide = any(name in label for name in WIDE)
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(path / "cache"),
            "TORCHINDUCTOR_COMPILE_THREADS": "4" if wide else "1",
            "OMP_NUM_THREADS": "2",
            "PYTHONUNBUFFERED": "1",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command, "--worker", label],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(READY):
                self.said = line.removeprefix(READY).strip()
                self.ready.set()
            elif line.startswith(ROW):
                self.row = json.loads(line.removeprefix(ROW))
        self.process.wait()
        self.ended.set()

    @property
    def compiles(self) -> bool:
        return not self.ready.is_set() and not self.ended.is_set()

    def go(self, turn: str = LAST) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has failed, which its row says
            self.process.stdin.write(f"{turn}\n")
            self.process.stdin.flush()

    def stop(self) -> None:
        """End it and the compiler's processes, which are of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()
        self.ended.set()  # its children may still hold the pipe

    def result(self, why: str) -> dict[str, Any]:
        """Its row, or why there is none."""
        if self.row is not None:
            return self.row
        said = self.log.read_text().strip().splitlines()[-12:]
        return {"model": self.label, "failure": why, "log": [line[:300] for line in said]}


class Session:
    """All models within the budget.

    Args:
        wanted: Labels.
        command: As of :class:`Worker`.
        shown: Of a row, what is printed.
    """

    def __init__(
        self,
        wanted: list[str],
        options: argparse.Namespace,
        command: list[str],
        shown: Callable[[dict[str, Any]], str],
    ) -> None:
        self.options, self.command, self.shown = options, command, shown
        WORK.mkdir(parents=True, exist_ok=True)
        self.start = time.perf_counter()
        self.left = wanted
        #: Of this round, and of all rounds.
        self.workers: list[Worker] = []
        self.all: list[str] = []
        self.alternates: float = getattr(options, "alternate_s", 0.0)
        look_s = 0.6 if getattr(options, "times_alone", False) else 1.8
        self.timing_s = self.alternates + look_s if self.alternates else TIMING_S
        self.out: Path = options.out
        self.out.mkdir(parents=True, exist_ok=True)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.start

    def write(self, row: dict[str, Any]) -> None:
        with (self.out / "rows.jsonl").open("a") as rows:
            rows.write(json.dumps(row) + "\n")
        shown = row.get("failure") or self.shown(row)
        print(f"{self.elapsed_s:5.0f} s {row['model']:46} {shown}", flush=True)

    def compile(self) -> None:
        """Until as many are compiled as may wait, or only the time is left to time those that are."""
        self.workers = []
        while True:
            busy = [worker for worker in self.workers if worker.compiles]
            ready = sum(worker.ready.is_set() for worker in self.workers)
            if self.elapsed_s + self.timing_s * ready + 20 > self.options.budget_s:
                break
            for worker in busy:
                if time.perf_counter() - worker.started > self.options.compile_s:
                    worker.stop()
            room = self.options.alive - sum(not worker.ended.is_set() for worker in self.workers)
            for label in self.left[: max(0, min(room, self.options.processes - len(busy)))]:
                self.left.remove(label)
                self.all.append(label)
                busy.append(Worker(label, self.command))
                self.workers.append(busy[-1])
            if not busy:
                break
            time.sleep(0.3)
        for worker in self.workers:
            if not worker.ready.is_set():
                worker.stop()
                self.write(worker.result("not compiled in time, or failed"))
        print(f"{self.elapsed_s:5.0f} s compiled; {len(self.left)} were not begun", flush=True)

    def finish(self) -> None:
        """Compile and time, in rounds."""
        while self.left and self.elapsed_s < self.options.budget_s - 60:
            self.compile()
            self.time()
        print(f"{self.elapsed_s:5.0f} s in all", flush=True)

    def time(self) -> None:
        compiled = [worker for worker in self.workers if worker.ready.is_set()]
        for _ in range(getattr(self.options, "rounds", 1) - 1):
            for worker in compiled:
                late = self.elapsed_s + LAST_S * len(compiled) > self.options.budget_s
                if worker.ended.is_set() or late:
                    continue
                worker.ready.clear()
                worker.go(TURN)
                begun_s = self.elapsed_s
                while not (worker.ready.wait(0.05) or worker.ended.is_set()):
                    if self.elapsed_s - begun_s > MOST_S:
                        worker.stop()
        for worker in compiled:
            remaining_s = self.options.budget_s - self.elapsed_s
            if remaining_s > 4 and not worker.ended.is_set():
                worker.go()
                until_s = self.elapsed_s + min(PATIENCE_S, remaining_s)
                while worker.row is None and not worker.ended.wait(0.05) and self.elapsed_s < until_s:
                    pass
                if not self.alternates:  # a second row tells more of the same
                    worker.ended.wait(timeout=min(PATIENCE_S, max(0.0, until_s - self.elapsed_s)))
            worker.stop()
            self.write(worker.result("not timed in time, or failed"))

    def archive(self) -> None:
        """What Inductor wrote: the files with whole graphs."""
        with tarfile.open(self.out / "code.tar.gz", "w:gz", compresslevel=6) as archive:
            for label in self.all:
                for path in sorted(folder(label).glob("cache/*/*.py")):
                    if "def call(" in path.read_text() and path.stat().st_size < 4_000_000:
                        archive.add(path, f"{folder(label).name}/{path.name}")


def foresee(name: str, anew: list[str]) -> dict[str, Any]:
    """Predictions of the steps that were measured later, for hosts of several speeds; those of before stay.

    Args:
        name: Of the GPU.
        anew: What the names of steps contain that are predicted, once more too, since nobody measured them
            yet; all that were not where there is none.
    """
    gpu = priced(name)
    known = runs(False, True)
    before = len(MODELS) + len(COMPILED)
    path = FORESEEN[name]
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [row for row in rows if not any(each in row["model"] for each in anew)]
    made = {row["model"] for row in rows}
    wanted = [run for run in known[before : before + len(PREDICTED) + len(PADDED)] if run.label not in made]
    for run in [run for run in wanted if not anew or any(each in run.label for each in anew)]:
        found = [predicted(run, gpu, scale) for scale in SCALES]
        first = found[0]
        row = {"model": run.label, "gpu_ms": first["predicted_gpu_ms"], "gib": first["predicted_gib"]}
        row["interval_ms"] = [each["predicted_interval_ms"] for each in found]
        rows.append({**row, "step_ms": [each["predicted_ms"] for each in found]})
        print(f"{run.label:40} GPU {row['gpu_ms']:7.2f} ms", flush=True)
    return {"gpu": name, "scales": SCALES, "rows": rows}


def beside(row: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Of a row, reference steps and steps, turn by turn. Of those that did not alternate (four turns or
    fewer), the fastest reference counts."""
    references, steps = row["reference_turns_ms"], row.get("sustained_turns_ms") or [row["sustained_ms"]]
    return (references if len(references) > 4 else [min(references)]), steps


def compare(measured: list[dict[str, Any]], only: list[str], gpu: str) -> None:
    """Print how far off the predictions were that had been made before, by the medians of all turns of all
    processes.

    Args:
        only: What the names contain of those that count; all where there is none.
        gpu: That they were measured on.
    """
    foreseen = json.loads(FORESEEN[gpu].read_text())
    off: dict[str, list[float]] = {"GPU": [], "step": [], "memory": []}
    inside: list[bool] = []
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in measured:
        if "wall_ms" in row and (not only or any(each in row["model"] for each in only)):
            rows.setdefault(row["model"], []).append(row)
    for before in foreseen["rows"]:
        if not (of_model := rows.get(before["model"])):
            continue
        turns = [beside(row) for row in of_model]
        scale = statistics.median(ms for references, _ in turns for ms in references) / (
            1e3 * REFERENCE_STEP_S
        )
        took_ms = statistics.median(ms for _, steps in turns for ms in steps)
        step_ms = float(np.interp(scale, foreseen["scales"], before["step_ms"]))
        if "interval_ms" in before:
            low_ms, high_ms = (
                float(np.interp(scale, foreseen["scales"], ends))
                for ends in zip(*before["interval_ms"], strict=True)
            )
            inside.append(low_ms <= took_ms <= high_ms)
        said = [f"{before['model']:36} host {scale:.2f}  step {step_ms:7.2f} of {took_ms:7.2f} ms"]
        errors = {"step": step_ms / took_ms - 1}
        for row in of_model:
            if row.get("gpu_ms"):
                errors["GPU"] = before["gpu_ms"] / row["gpu_ms"] - 1
                errors["memory"] = before["gib"] / row["peak_gib"] - 1
                said.append(f"GPU {before['gpu_ms']:7.2f} of {row['gpu_ms']:7.2f}")
        for kind, error in errors.items():
            off[kind].append(abs(error))
        print("  ".join([*said, *(f"{kind} {error:+.1%}" for kind, error in errors.items())]))
    if inside:
        print(f"in the interval: {sum(inside)} of {len(inside)} steps")
    for kind, each in off.items():
        print(f"{kind}: median {statistics.median(each):.1%}, worst {max(each):.1%} of {len(each)} steps")


def tiny(run: Run) -> Run:
    """For a trial without a GPU."""
    small = {"batch": 2, "seq": 16, "image_size": 64}
    return Run(run.target, {k: small[k] for k in run.sizes}, run.channels_last, True, arguments=run.arguments)


def recorded(path: Path) -> list[dict[str, Any]]:
    """The rows of a result, or of lines."""
    text = path.read_text()
    if path.suffix == ".json":
        return list(json.loads(text)["rows"])
    return [json.loads(line) for line in text.splitlines()]


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """A row of turns that alternate with the reference's, to a microsecond; of its kernels the longest."""
    found = {key: [np.round(each, 3).tolist() for each in value] if key.endswith("_turns_ms") else value
             for key, value in row.items()}  # fmt: skip
    listed = found.pop("kernel_list", [])
    return {**found, **({"kernel_list": listed[:20]} if listed else {})}


def calls(code: str) -> dict[str, int]:
    """Calls that a graph makes in the code that Inductor wrote, and the tensors that it is given."""
    body = code[code.index("def call(") :]
    named = re.findall(r"extern_kernels\.(\w+)\(|ops\.aten\.(\w+?)\.default\(", body)
    counts = collections.Counter(first or second for first, second in named)
    found = {name: count for name, count in counts.items() if "_attention" not in name}
    arguments = re.search(r"\n\s+(.*?) = args\n", body, re.DOTALL)
    return {
        **found,
        "run": body.count(".run("),
        "attention": counts.total() - sum(found.values()),
        "given": arguments.group(1).count(",") + 1 if arguments else 0,
    }


def counted_calls(path: Path) -> dict[str, dict[str, collections.Counter[str]]]:
    """By model's folder and graph, the calls of the code that was kept (``code.tar.gz``)."""
    found: dict[str, dict[str, collections.Counter[str]]] = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            text = file.read().decode()
            graph = "backward" if "tangents_1" in text or "convolution_backward" in text else "forward"
            graphs = found.setdefault(member.name.partition("/")[0], {})
            graphs.setdefault(graph, collections.Counter()).update(calls(text))
    return found


def with_calls(rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Rows with the calls of the code that was kept with them (``code.tar.gz``), and their parameters."""
    found = counted_calls(path)
    known = {run.label: run for run in runs(False, True)}
    for row in rows:
        graphs = found.get(folder(row["model"]).name, {})
        if "wall_ms" in row and len(graphs) == 2:
            model = known[row["model"]].load("meta").model
            trained = sum(parameter.requires_grad for parameter in model.parameters())
            row["calls"] = {**graphs, "parameters": trained}
    return rows


def pack(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """A result: kernels grouped by name, without the smallest three percent of the time, one row a line.

    Args:
        about: GPU, driver, versions and date of the measurement.
    """
    lines = []
    for row in rows:
        if "wall_ms" not in row:
            lines.append({"model": row["model"], "failure": row["failure"]})
            continue
        if "eager" not in row:
            lines.append(rounded(row))
            continue
        eager, graphs = row.pop("eager"), row.pop("graphs")
        grouped: dict[str, list[float]] = {}
        for time_ms, count, name in row.pop("kernel_list"):
            whole = re.sub(r"(?<=.{20})_\d+$", "", name) if name.startswith("triton_") else name
            into = grouped.setdefault(whole, [0.0, 0])
            into[0] += time_ms
            into[1] += count
        left_ms = row["gpu_ms"]
        row["kernel_list"] = []
        for name, (time_ms, count) in sorted(grouped.items(), key=lambda item: -item[1][0]):
            if left_ms > 0.03 * row["gpu_ms"]:
                row["kernel_list"].append([round(time_ms, 4), count, name])
            left_ms -= time_ms
        row["graph_breaks"] = sum(row["graph_breaks"].values())
        row["channels_last"] = [graph["channels_last"] for graph in graphs if not graph["backward"]]
        row["eager"] = {key: eager.get(key) for key in ("gpu_ms", "sustained_ms", "failure") if key in eager}
        row["scheduled"] = [sum(kernel[-1] for kernel in graph["kernels"]) for graph in graphs]
        row.pop("host_profile", None)
        lines.append(row)
    inside = ",\n".join(json.dumps(line) for line in lines)
    return json.dumps({**about, "compiled": True})[:-1] + f', "rows": [\n{inside}\n]}}\n'


def shown(row: dict[str, Any]) -> str:
    return f"{row['sustained_ms']:8.2f} ms, GPU {row.get('gpu_ms', 0.0):8.2f}"


def session_arguments(parser: argparse.ArgumentParser, out: Path) -> None:
    """What a session of processes reads."""
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=13, help="models that are compiled at a time")
    parser.add_argument("--alive", type=int, default=36, help="models that are in memory at a time")
    parser.add_argument("--compile-s", type=float, default=330.0, help="given up after this time")
    parser.add_argument("--budget-s", type=float, default=560.0)
    parser.add_argument("--worker", default="", help="used by the script itself")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    session_arguments(parser, Path("compiled_steps"))
    parser.add_argument("--only", default="", help="models whose name contains one of these, by commas")
    parser.add_argument("--done", type=Path, nargs="*", default=[RECORDED], help="rows that exist")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="how often each is timed, spread over the run")
    parser.add_argument(
        "--alternate-s", type=float, default=0.0, help="seconds of steps and reference steps in turn"
    )
    parser.add_argument("--times-alone", action="store_true", help="of these, without kernels and memory")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a trial")
    parser.add_argument("--pack", type=Path, nargs="+", help="rows to make a result of, at --out")
    parser.add_argument("--code", type=Path, help="the code of these rows, whose calls are counted")
    parser.add_argument("--predict", action="store_true", help="write predictions of steps to be measured")
    parser.add_argument("--gpu", default="h100-sxm", choices=FORESEEN, help="the GPU to predict for")
    parser.add_argument("--compare", type=Path, nargs="+", help="rows to compare with what was predicted")
    parser.add_argument("--about", type=json.loads, default={}, help="what the result says of these rows")
    options = parser.parse_args()
    if options.pack:
        rows = [row for path in options.pack for row in recorded(path)]
        rows = with_calls(rows, options.code) if options.code else rows
        options.out.write_text(pack(rows, options.about))
        return
    names = options.only.split(",")
    if options.predict:
        made = foresee(options.gpu, [each for each in names if each])
        FORESEEN[options.gpu].write_text(json.dumps(made, indent=1) + "\n")
        return
    if options.compare:
        rows = [row for path in options.compare for row in recorded(path)]
        compare(rows, [each for each in names if each], options.gpu)
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("This measures on a GPU, and PyTorch finds none here.")
    listed = runs(False, True)
    # Those that were measured first, or set something, are the last to be compiled.
    later = len(MODELS) + len(COMPILED)
    listed = listed[later:] + listed[len(MODELS) : later] + listed[: len(MODELS)]
    known = [tiny(run) if options.tiny else run for run in listed]
    if options.worker:
        run = next(run for run in known if run.label == options.worker)
        if options.alternate_s:
            work_alternating(run, options.device, options.alternate_s, not options.times_alone)
        else:
            work(run, options.device, options.turns)
        return
    done = {row["model"] for path in options.done for row in recorded(path) if "gpu_ms" in row}
    labels = [run.label for run in known]
    found = [each for name in names for each in labels if each not in done and name in each]
    wanted = [*dict.fromkeys(found)]
    command = [
        __file__,
        "--device",
        options.device,
        "--turns",
        str(options.turns),
        "--alternate-s",
        str(options.alternate_s),
    ]
    command += ["--times-alone"] if options.times_alone else []
    command += ["--tiny"] if options.tiny else []
    session = Session(wanted, options, command, shown)
    session.finish()
    session.archive()


if __name__ == "__main__":
    main()
