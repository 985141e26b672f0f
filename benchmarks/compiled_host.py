"""Where the host's time goes in a compiled training step: of tiny models that differ in one thing each.

    PYTHONPATH=src python benchmarks/compiled_host.py --out DIR --budget-s 140
    PYTHONPATH=src python benchmarks/compiled_host.py --pack DIR/rows.jsonl --code DIR/code.tar.gz \\
        --about '{…}' --out benchmarks/results/compiled_host_h200.json
    PYTHONPATH=src python benchmarks/compiled_host.py --show benchmarks/results/compiled_host_h200.json

They are compiled at once and timed one after another, as in ``compiled_steps.py``. The host's clock is read
in the running step, which waits for nothing: before and after each call of the compiler's own code, the
forward pass, the backward pass, the optimizer and ``zero_grad``. Steps are taken back to back (``hot``), in
turn with the reference step (``first``, the first of these: what the step needs has left the caches), and
with caches of the host overwritten before each, in the thread of the forward pass and in that of the backward
pass (``evicted``; ``evicted_far`` beyond the caches of one core, too). Other optimizers take turns as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compiled_calls import WIDTH, Attentions, Chain, Kernels, Made, Parameters
from compiled_steps import (
    ROW,
    WORK,
    Session,
    counted_calls,
    lock_benchmarks,
    patiently,
    recorded,
    session_arguments,
    when_called,
)
from torch import nn
from torch.nn import functional as F

from tilefit.cost.launch import REFERENCE_STEP_S
from tilefit.measure.launch import launch_scale, reference_step

PHASES = (
    "before the forward graph",
    "forward graph",
    "after it",
    "before the backward graph",
    "backward graph",
    "after it",
    "optimizer",
    "zero_grad",
)
#: Beginnings and ends of the two graphs.
NOTED = 4
#: Steps of a way in a turn, and the bytes that are written to overwrite caches.
STEPS = 8
NEAR_BYTES, FAR_BYTES = 6 << 20, 96 << 20


class Distinct(nn.Module):
    """Kernels none of which is like another: softmaxes, whose results the backward pass reads, or
    differences of sums, whose backward pass reads nothing."""

    def __init__(self, count: int, kept: bool) -> None:
        super().__init__()
        self.count, self.kept = count, kept
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for index in range(self.count):
            scaled, dim = x * (1 + index / 1024), index % 2
            x = F.softmax(scaled, dim) if self.kept else scaled - scaled.mean(dim, keepdim=True)
        return x.square().sum()


class Towers(nn.Module):
    """Two tables, and how rows of one are liked by rows of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(10_000, WIDTH), nn.Embedding(10_000, WIDTH)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return F.softplus(-(self.users(users) * self.items(items)).sum(-1)).mean()


def _square() -> tuple[torch.Tensor]:
    return (torch.randn(WIDTH, WIDTH),)


def _chain(make: Callable[[], nn.Module], count: int, times: int) -> Made:
    return Chain(make, count, times), (torch.randn(256, WIDTH),)


def _perceptron() -> Made:
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3))
    return Chain(lambda: next(layers), 3), (torch.randn(256, WIDTH),)


def _convolutions() -> Made:
    conv = partial(nn.Conv2d, WIDTH, WIDTH, 3, padding=1, bias=False)
    return Chain(conv, 1, 16), (torch.randn(4, WIDTH, 8, 8),)


_PRODUCT = partial(nn.Linear, WIDTH, WIDTH, bias=False)
MODELS: dict[str, Callable[[], Made]] = {
    "kernels_64": lambda: (Distinct(64, True), _square()),
    "kernels_read_nothing_64": lambda: (Distinct(64, False), _square()),
    "parameters_192": lambda: (Parameters(192), _square()),
    "parameters_64": lambda: (Parameters(64), _square()),
    "kernels_16": lambda: (Distinct(16, True), _square()),
    "kernels_4": lambda: (Distinct(4, True), _square()),
    "kernels_read_nothing_16": lambda: (Distinct(16, False), _square()),
    "kernels_repeated_64": lambda: (Kernels(64, False), _square()),
    "products_64": lambda: _chain(_PRODUCT, 1, 64),
    "products_8": lambda: _chain(_PRODUCT, 1, 8),
    "parameters_8": lambda: (Parameters(8), _square()),
    "inputs_64": lambda: (Parameters(1), _square() * 64),
    "towers": lambda: (Towers(), tuple(torch.randint(0, 10_000, (256,)) for _ in range(2))),
    "perceptron": _perceptron,
    "perceptron_fp32": _perceptron,
    "convolutions_16": _convolutions,
    "attention_8": lambda: (Attentions(8), (torch.randn(2, WIDTH, WIDTH),)),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "foreach": partial(torch.optim.AdamW, lr=1e-6),
    "fused": partial(torch.optim.AdamW, lr=1e-6, fused=True),
    "sgd": partial(torch.optim.SGD, lr=1e-6, momentum=0.9),
}


def note_graphs(marks: list[float]) -> None:
    """Note when calls of the code that the compiler wrote begin and end."""
    from torch._inductor.output_code import CompiledFxGraph

    call = CompiledFxGraph.__call__

    def noted(graph: Any, inputs: Any) -> Any:
        marks.append(time.perf_counter())
        try:
            return call(graph, inputs)
        finally:
            marks.append(time.perf_counter())

    CompiledFxGraph.__call__ = noted


class _Overwriting(torch.autograd.Function):
    """Something that is done in the thread of the backward pass."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, done: Callable[[], object]) -> torch.Tensor:
        context.done = done
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        context.done()
        return gradient, None


class Stepped:
    """A compiled model whose steps note when their phases are passed."""

    def __init__(self, name: str, device: str) -> None:
        torch.manual_seed(0)
        made, inputs = MODELS[name]()
        self.device, self.narrow = device, not name.endswith("fp32")
        self.model = made.to(device).train()
        self.inputs = tuple(each.to(device) for each in inputs)
        self.noted: list[float] = []
        note_graphs(self.noted)
        self.run = torch.compile(self.model)
        self.optimizers = {key: make(self.model.parameters()) for key, make in OPTIMIZERS.items()}
        self.other = torch.zeros((), device=device, requires_grad=True)

    def step(self, optimizer: str = "foreach") -> list[float]:
        """Seconds of each phase."""
        passed = [time.perf_counter()]
        self.noted.clear()
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.narrow):
            loss = self.run(*self.inputs)
        passed.append(time.perf_counter())
        loss.backward()
        passed.append(time.perf_counter())
        self.optimizers[optimizer].step()
        passed.append(time.perf_counter())
        self.optimizers[optimizer].zero_grad()
        passed.append(time.perf_counter())
        if len(self.noted) != NOTED:
            raise RuntimeError(f"calls of the two graphs were noted {len(self.noted)} times")
        start, forward, *rest = passed
        marks = start, *self.noted[:2], forward, *self.noted[2:], *rest
        return [after - before for before, after in pairwise(marks)]

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def overwrite(self, memory: np.ndarray[Any, Any]) -> None:
        """Caches of the host, in both threads."""

        def write() -> None:
            memory[:] += 1

        write()
        _Overwriting.apply(self.other, write).backward()
        self.synchronize()


def timed(model: Stepped, seconds: float) -> dict[str, Any]:
    """All ways in turn for so long: of each the median whole step over its turns, and of each phase, in
    microseconds."""
    reference = reference_step(torch.device(model.device))
    near, far = (np.zeros(size // 8) for size in (NEAR_BYTES, FAR_BYTES))
    whole: dict[str, list[float]] = {}
    phases: dict[str, list[list[float]]] = {}
    references: list[float] = []

    def repeated(way: str, steps: int = STEPS, optimizer: str = "foreach") -> None:
        model.synchronize()
        start = time.perf_counter()
        found = [model.step(optimizer) for _ in range(steps)]
        model.synchronize()
        whole.setdefault(way, []).append((time.perf_counter() - start) / steps)
        phases.setdefault(way, []).extend(found)

    def turn() -> None:
        reference()
        model.synchronize()
        start = time.perf_counter()
        for _ in range(3):
            reference()
        model.synchronize()
        references.append((time.perf_counter() - start) / 3)
        repeated("first", 1)
        repeated("hot")
        for memory, way in ((near, "evicted"), (near, "evicted"), (far, "evicted_far")):
            model.overwrite(memory)
            repeated(way, 1)
        for optimizer in ("fused", "sgd"):
            repeated("warm", 1, optimizer)
            repeated(optimizer, STEPS, optimizer)

    end = time.perf_counter() + seconds
    turn()
    whole.clear(), phases.clear(), references.clear()
    while time.perf_counter() < end or len(references) < 2:
        turn()
    return {
        "reference_turns_ms": [round(1e3 * each, 3) for each in references],
        "whole_us": {way: [round(1e6 * each, 1) for each in found] for way, found in whole.items()},
        "phases_us": {
            way: [_median_us(each) for each in zip(*found, strict=True)] for way, found in phases.items()
        },
    }


def _median_us(seconds: Iterable[float]) -> float:
    return round(1e6 * statistics.median(seconds), 1)


def work(name: str, device: str, seconds: float) -> None:
    """Compile, say so, and when called print a row."""
    torch._inductor.config.compile_threads = 4
    lock_benchmarks()
    start = time.perf_counter()
    model = Stepped(name, device)
    patiently(lambda: [model.step(each) for each in (*OPTIMIZERS, *OPTIMIZERS)])
    model.synchronize()
    compile_s = time.perf_counter() - start
    with when_called():
        row = {"model": name, **timed(model, seconds)}
        row["launch_scale"] = launch_scale(torch.device(device))
    row["parameters"] = len([*model.model.parameters()])
    print(ROW + json.dumps({**row, "compile_s": round(compile_s, 1)}), flush=True)


def shown(row: dict[str, Any]) -> str:
    """Microseconds on the stated host."""
    over = statistics.median(row["reference_turns_ms"]) / (1e3 * REFERENCE_STEP_S)
    lines = [f"host {over:.2f}, {row.get('launch_scale', 0.0):.2f}  {row.get('calls', '')}"]
    for way, each in row["phases_us"].items():
        parts = "".join(f"{us / over:8.0f}" for us in each)
        lines.append(
            f"    {way:12} {statistics.median(row['whole_us'][way]) / over:8.0f} of{parts}"
            f" = {sum(each) / over:.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    session_arguments(parser, Path("compiled_host"))
    parser.add_argument("--only", default="", help="models whose name contains one of these, by commas")
    parser.add_argument("--seconds", type=float, default=1.5, help="that a model is timed")
    parser.add_argument("--pack", type=Path, help="rows to make a result of, at --out")
    parser.add_argument("--code", type=Path, help="the code of these rows, whose calls are counted")
    parser.add_argument("--about", type=json.loads, default={}, help="what the result says of these rows")
    parser.add_argument("--show", type=Path, nargs="+", help="results to print")
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.device, options.seconds)
        return
    if options.show:
        for row in (row for path in options.show for row in recorded(path)):
            print(row["model"], row.get("failure") or shown(row))
        return
    if options.pack:
        rows = recorded(options.pack)
        graphs = counted_calls(options.code)
        rows = [{**row, "calls": graphs.get(row["model"], {})} for row in rows]
        lines = ",\n".join(json.dumps(row) for row in rows)
        options.out.write_text(json.dumps(options.about)[:-1] + f', "rows": [\n{lines}\n]}}\n')
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("This measures on a GPU, and PyTorch finds none here.")
    WORK.mkdir(parents=True, exist_ok=True)
    names = [name for name in MODELS if any(each in name for each in options.only.split(","))]
    command = [__file__, "--device", options.device, "--seconds", str(options.seconds)]
    session = Session(names, options, command, shown)
    session.alternates, session.timing_s = options.seconds, options.seconds + 1.0
    session.finish()
    session.archive()


if __name__ == "__main__":
    main()
