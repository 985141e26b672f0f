"""Measure what `tilefit.optimize` gains on a GPU, eager and compiled, many models in a short time.

    PYTHONPATH=src python benchmarks/compiled_gain.py --out DIR --budget-s 560 --variants AB
    PYTHONPATH=src python benchmarks/compiled_gain.py --out DIR --budget-s 560 --variants ACDE

A model's training step is timed in up to five variants, in turn in the same rounds:

    A  the program as it is, eager
    B  with the plan that may not compile the whole model
    C  the program as it is, with torch.compile(model)
    D  with the plan that users get: it may compile the whole model
    E  compiled, with the plan that is made for a program that is compiled already

A/B is the gain of an eager program that stays one, A/D what users get by default, C/E the gain over the
compiler alone: of each the median over the rounds, with an interval of the median. Variants that are changed
alike are one.

Every model has a process, which plans without the GPU, waits until its step fits beside those that are there,
compiles what its variants compile, gives back what memory a waiting model does without, and is stopped
(SIGSTOP). When all are, one after another they go on and are timed, while nothing else runs; where not all
fit, in several rounds. A row is in ``DIR/rows.jsonl`` as soon as it is there; models that have one with these
variants there or in a file of ``--done`` are left out. A failure is a row too, and not done.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from compiled_steps import (
    ROW,
    WORK,
    Worker,
    called_after,
    lock_benchmarks,
    patiently,
    recorded,
    session_arguments,
    when_called,
)
from fix_gain import MODELS, Planned, Variant, load_model, planned, synchronize, timed, under_the_compiler
from torch._dynamo.utils import counters

from tilefit.fixes.kinds.settings import DEFAULT, REDUCE_OVERHEAD, compilation
from tilefit.fixes.planning.measuring import each_compiled_anew
from tilefit.measure.launch import launch_scale

#: Those that compile fast first; what fills the memory last.
FIRST = (
    "resnext resnet50-nhwc convnext speech odd-encoder graph autoencoder vit-mae electra odd-mlp odd-cnn "
    "attention-by-hand recommender segmenter detector deberta swin efficientnet-nhwc densenet unet "
    "lstm-lm vit gpt2 roberta bert-mlm distilbert opt resnet50-nchw mobilenet-v3-nchw bart t5 whisper-small "
    "llama-1b-odd llama-1b"
).split()
#: How variants are planned: as of :func:`fix_gain.planned`. The other two are not.
PLANS = {"B": {"compiled": False}, "D": {"compiled": False, "may_compile": True}, "E": {"compiled": True}}
#: Which are compiled by the user.
COMPILED = "CE"
#: What is compared with what.
GAINS = {"eager": "AB", "default": "AD", "compiled": "CE"}
#: Bytes of a parameter that waits for its turn: its value and AdamW's two.
STATE_BYTES = 12
#: GiB of a process that has used the GPU, beside its tensors; and left to all of them.
CONTEXT_GIB, SPARE_GIB = 0.8, 4.0
#: Steps before a variant is warm: a fix's CUDA graphs are captured in the third call.
WARM_STEPS = 4
#: Seconds in which an interrupted process has to be ready.
GRACE_S = 15.0
#: Seconds that a turn may take.
MOST_S = 60.0
#: A smaller gain is a loss.
LEAST = 0.99


# ---- a process of a model ----------------------------------------------------------------------


def changes(plan: Planned, letter: str) -> frozenset[str]:
    """What is done to the program, in words."""
    made = {candidate.words for candidate in plan.first(len(plan.fixes))}
    whole, replayed = (compilation(mode).words for mode in (DEFAULT, REDUCE_OVERHEAD))
    if letter in COMPILED:
        made.add(whole)
    return frozenset(made - {whole} if replayed in made else made)


class Model:
    """A model's plans and variants.

    Attributes:
        plans: By letter; A and C have empty ones.
        letters: Of each variant; several where they are changed alike.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options = name, options
        self.row: dict[str, Any] = {"model": name}
        self.plans = {
            letter: planned(
                name, options.gpu, "safe", scale=options.scale, ignore=options.ignore.split(), **PLANS[letter]
            )
            if letter in PLANS
            else Planned((), {})
            for letter in options.variants
        }
        alike: dict[frozenset[str], str] = {}
        for letter, plan in self.plans.items():
            made = changes(plan, letter)
            alike[made] = alike.get(made, "") + letter
        self.letters = list(alike.values())
        self.replayed = sum(any("CUDA graph" in words for words in made) for made in alike)
        self.loaded = load_model(MODELS[name], "cpu", options.device == "cpu")
        self.row["plans"] = {letter: plan.row for letter, plan in self.plans.items() if plan.row}

    def needed_gib(self) -> float:
        """GPU memory while one variant runs and the others wait; a replayed one keeps its activations."""
        step_gib = max((plan["predicted_gib"][0] for plan in self.row["plans"].values()), default=0.0)
        state_gib = STATE_BYTES * sum(p.numel() for p in self.loaded.model.parameters()) / 2**30
        return CONTEXT_GIB + 1.1 * step_gib * (1 + self.replayed) + state_gib * (len(self.letters) - 1)

    def variants(self) -> list[Variant]:
        """Those that could be made ready, warm. An interrupt ends it: the row has those that are ready."""
        ready: list[Variant] = []
        self.row.update(variants={}, compile_s={}, graphs={}, failures={})
        for letters in self.letters:
            start = time.perf_counter()
            counters.clear()
            try:
                patiently(lambda letters=letters: ready.append(self._warm(letters[0])))
            except KeyboardInterrupt:
                self.row["failures"][letters] = "not compiled in time"
                break
            except Exception as error:  # noqa: BLE001 - the others are worth a row
                self.row["failures"][letters] = f"{type(error).__name__}: {error}"[:500]
            else:
                self.row["variants"] |= dict.fromkeys(letters, len(ready) - 1)
                self.row["compile_s"][letters] = round(time.perf_counter() - start, 1)
                self.row["graphs"][letters] = counters["stats"]["unique_graphs"]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        del self.loaded  # as many of them as wait fill the host's memory
        return ready

    def _warm(self, letter: str) -> Variant:
        plan = self.plans[letter]
        candidates = plan.first(len(plan.fixes))
        variant = Variant(letter, self.loaded, MODELS[self.name], candidates, self.options.device)
        if letter in COMPILED:
            under_the_compiler(variant)
        with variant.flags():
            for _ in range(WARM_STEPS):
                variant.step()
        synchronize(self.options.device)
        return variant


def free(device: str) -> float:
    """Give back what no tensor is in; what is still held, in GiB."""
    gc.collect()
    if device != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    return CONTEXT_GIB + torch.cuda.memory_reserved() / 2**30


def work(name: str, options: argparse.Namespace) -> None:
    """Plan, wait for memory, compile, wait for the turn, time, and print the row."""
    torch.set_num_threads(1)
    lock_benchmarks()
    model = Model(name, options)
    called_after(f"{model.needed_gib():.2f}")
    # Of each code as many versions as when every variant had a process of its own.
    torch._dynamo.config.recompile_limit *= len(model.letters)
    with each_compiled_anew():
        if variants := model.variants():
            with when_called(f"{free(options.device):.2f}"):
                timed(model.row, variants, options)
    print(ROW + json.dumps(model.row), flush=True)


# ---- the process that starts them ----------------------------------------------------------------

#: What a process does, or waits for.
PLANNING, PLANNED, PREPARING, READY, ENDED = "planning", "planned", "preparing", "ready", "ended"


class Place:
    """A model's process, and how far it is.

    Attributes:
        gib: The GPU memory that it needs while it prepares or runs, and that it holds when it waits.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker, self.state = worker, PLANNING
        self.needed_gib = self.held_gib = 0.0
        self.since = time.perf_counter()
        self.is_interrupted = False

    def notice(self) -> None:
        """Follow what it has said."""
        if self.worker.ended.is_set():
            self.state = ENDED
        elif self.worker.ready.is_set() and self.state == PLANNING:
            self.needed_gib, self.state = float(self.worker.said), PLANNED
        elif self.worker.ready.is_set() and self.state == PREPARING:
            self.held_gib, self.state = float(self.worker.said), READY
            self.signal(signal.SIGSTOP)

    def prepare(self) -> None:
        """Let it onto the GPU."""
        self.worker.ready.clear()
        self.since, self.state = time.perf_counter(), PREPARING
        self.worker.go()

    def signal(self, number: int) -> None:
        """To it and to the compiler's processes, which are of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.worker.process.pid, number)

    def interrupt(self) -> None:
        """Have it wait for its turn with what is compiled."""
        if not self.is_interrupted:
            self.is_interrupted, self.since = True, time.perf_counter()
            self.worker.process.send_signal(signal.SIGINT)
        elif time.perf_counter() - self.since > GRACE_S:
            self.worker.stop()


class Measurement:
    """All models within the budget.

    Args:
        wanted: Names.
        command: The script and its arguments.
        capacity_gib: The memory of the GPU.
    """

    def __init__(
        self, wanted: list[str], options: argparse.Namespace, command: list[str], capacity_gib: float
    ) -> None:
        self.options, self.command, self.left = options, command, wanted
        self.capacity_gib = capacity_gib
        self.start = time.perf_counter()
        self.places: list[Place] = []
        self.late = False
        #: Seconds that a turn takes, about.
        self.turn_s = options.model_s + 1.0 + len(options.variants)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.start

    def of(self, *states: str) -> list[Place]:
        return [place for place in self.places if place.state in states]

    @property
    def is_late(self) -> bool:
        """Only the time is left to time those that are ready or about to be."""
        turns_s = self.turn_s * len(self.of(PREPARING, READY))
        return self.elapsed_s + turns_s + GRACE_S > self.options.budget_s

    def run(self) -> None:
        while self.left or self.places:
            for place in self.places:
                place.notice()
            for place in self.of(ENDED):
                self.leave(place, "failed, or not in time")
            self.late |= self.is_late
            for place in self.of(PREPARING):
                if (
                    self.late
                    or time.perf_counter() - place.since > self.options.compile_s
                    or place.is_interrupted
                ):
                    place.interrupt()
            if self.late:
                for place in self.of(PLANNING, PLANNED):
                    place.worker.stop()
                    self.places.remove(place)
                    self.left.append(place.worker.label)
            else:
                self.begin()
            if not self.of(PLANNING, PREPARING):
                self.time()
                if self.late:
                    break
            time.sleep(0.2)
        print(f"{self.elapsed_s:5.0f} s in all; {len(self.left)} were not begun", flush=True)

    def begin(self) -> None:
        """As many as there are cores for, and memory."""
        room = self.options.processes - len(self.of(PLANNING, PREPARING))
        for place in self.of(PLANNED):
            if room > 0 and self.fits(place):
                place.prepare()
                room -= 1
        for name in self.left[: max(0, min(room, self.options.alive - len(self.places)))]:
            self.left.remove(name)
            self.places.append(Place(Worker(name, self.command)))

    def fits(self, place: Place) -> bool:
        """Whether it can prepare beside those that do, and each then run while the others wait."""
        held = self.of(READY)
        preparing = [*self.of(PREPARING), place]
        at_once = [
            sum(each.needed_gib for each in preparing),
            *(each.needed_gib - each.held_gib for each in held),
        ]
        needed_gib = sum(each.held_gib for each in held) + max(at_once)
        return needed_gib <= self.capacity_gib or not (held or preparing[1:])

    def time(self) -> None:
        """Those that are ready, one after another, while all others are stopped."""
        if ready := self.of(READY):
            print(f"{self.elapsed_s:5.0f} s {len(ready)} are ready", flush=True)
        waiting = self.of(PLANNED)
        for place in waiting:
            place.signal(signal.SIGSTOP)
        for place in ready:
            remaining_s = self.options.budget_s - self.elapsed_s
            if remaining_s > 4:
                place.signal(signal.SIGCONT)
                place.worker.go()
                until_s = self.elapsed_s + min(MOST_S, remaining_s)
                while place.worker.row is None and self.elapsed_s < until_s:
                    if place.worker.ended.wait(0.1):
                        break
            self.leave(place, "not timed in time, or failed")
        for place in waiting:
            place.signal(signal.SIGCONT)

    def leave(self, place: Place, why: str) -> None:
        place.worker.stop()
        self.places.remove(place)
        row = place.worker.result(why)
        with (self.options.out / "rows.jsonl").open("a") as rows:
            rows.write(json.dumps(row) + "\n")
        print(f"{self.elapsed_s:5.0f} s {row['model']:18} {row.get('failure') or shown(row)}", flush=True)


# ---- what came of it -----------------------------------------------------------------------------


def interval(values: list[float]) -> tuple[float, float, float]:
    """The median, and the narrowest pair of values around it that hold the median of what they are drawn from
    in 95 of 100 cases, however they are distributed (by the binomial distribution)."""
    ordered, count = sorted(values), len(values)
    outside = 0
    while (
        2 * (outside + 1) < count
        and 2 * sum(math.comb(count, each) for each in range(outside + 2)) <= 0.05 * 2**count
    ):
        outside += 1
    return statistics.median(ordered), ordered[outside], ordered[-1 - outside]


def gains(row: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """By what is compared: the gain, with its interval; exactly one where nothing is changed."""
    found = {}
    for name, (before, after) in GAINS.items():
        if {before, after} <= row.get("variants", {}).keys() and "rounds_ms" in row:
            times = [row["rounds_ms"][row["variants"][letter]] for letter in (before, after)]
            found[name] = interval([first / second for first, second in zip(*times, strict=True)])
    return found


def shown(row: dict[str, Any]) -> str:
    said = [f"{name} {gain:.3f} [{low:.3f}, {high:.3f}]" for name, (gain, low, high) in gains(row).items()]
    walls = row.get("wall_ms", [])
    said += [f"{letter} {walls[index]:.2f}" for letter, index in row["variants"].items()]
    said += [f"{letters}: {why[:60]}" for letters, why in row["failures"].items()]
    for letter, plan in row["plans"].items():
        fixes = " ".join(fix["name"] for fix in plan["fixes"])
        said.append(f"{letter} ({plan['predicted_speedup']:.2f}) {fixes}")
    return ", ".join(said)


def summarize(rows: list[dict[str, Any]]) -> None:
    """Print what was gained: of a model the last row that tells."""
    for name in GAINS:
        last = {row["model"]: (gains(row)[name], row["variants"]) for row in rows if name in gains(row)}
        if not last:
            continue
        before, after = GAINS[name]
        changed = [g[0] for g, variants in last.values() if variants[before] != variants[after]]
        mean = statistics.geometric_mean(gain[0] for gain, _ in last.values())
        least = min(last, key=lambda model: last[model][0][0])
        print(f"{name}: {len(last)} models {mean:.3f} times, least {last[least][0][0]:.3f} ({least})", end="")
        print(f"; {len(changed)} changed {statistics.geometric_mean(changed):.3f}" if changed else "")
        for model, ((gain, low, high), _) in last.items():
            if gain < LEAST:
                verdict = "beyond the noise" if high < 1.0 else "within the noise"
                print(f"  {model}: {gain:.3f} [{low:.3f}, {high:.3f}], a loss {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    session_arguments(parser, Path("compiled_gain"))
    parser.add_argument("--gpu", default="h200", help="the GPU to plan for")
    parser.add_argument("--variants", default="ABCDE", help="those that are timed, in this order")
    parser.add_argument("--models", default="", help="names, with commas between; all if empty")
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="rows that exist")
    parser.add_argument("--rounds", type=int, default=8, help="at least")
    parser.add_argument("--model-s", type=float, default=3.0, help="a model's rounds take at least so long")
    parser.add_argument("--round-s", type=float, default=0.15, help="about how long one variant's turn is")
    parser.add_argument("--ignore", default="", help="fixes that no plan gets, with spaces between")
    parser.add_argument("--scale", type=float, default=0.0, help="the host's launch scale; measured if 0")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("This measures on a GPU, and PyTorch finds none here.")
    if options.worker:
        work(options.worker, options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    own = options.out / "rows.jsonl"
    known = [*options.done, *([own] if own.exists() else [])]
    done = {
        row["model"]
        for path in known
        for row in recorded(path)
        if "wall_ms" in row and set(options.variants) <= row.get("variants", {}).keys()
    }
    wanted = [name for name in options.models.split(",") if name] or FIRST
    unknown = sorted(set(wanted) - set(MODELS))
    if unknown:
        sys.exit(f"There is no model {unknown[0]}; there are {', '.join(MODELS)}.")
    device = torch.device(options.device)
    # Before any process begins: what it is while others load says nothing of a step that runs alone.
    scale = options.scale or statistics.median(launch_scale(device) for _ in range(5))
    print(f"launch scale {scale:.3f}", flush=True)
    capacity_gib = math.inf if options.device == "cpu" else torch.cuda.mem_get_info()[1] / 2**30 - SPARE_GIB
    command = [__file__, "--scale", str(scale)]
    for name in ("device", "gpu", "ignore", "variants", "rounds", "model_s", "round_s"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    Measurement([name for name in wanted if name not in done], options, command, capacity_gib).run()
    summarize([row for path in dict.fromkeys([*known, own]) if path.exists() for row in recorded(path)])


if __name__ == "__main__":
    main()
