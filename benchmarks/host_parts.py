"""What the host's part of a step is made of: single calls, whole models and whole programs, on one host.

Three tables, of one run, so that what one says can be held against the others:

- ``part``: microseconds of one call of an operation, a view, a module, an optimizer: without gradients, with
  them, and what its backward pass takes; of 40 in a row of tensors so small that the host is the slower;
- ``model``: forward pass, backward pass and optimizer of models with one or two samples, and the forward pass
  alone; wall time and, beside it, the processor's time of all threads, which other processes do not lengthen;
- ``program``: the loops of whole programs (``program_ops.py``), in processes of their own;
- ``reference``: what ``tilefit calibrate`` makes of the host, between all of these.

    PYTHONPATH=src python benchmarks/host_parts.py --out rows.jsonl
    PYTHONPATH=src python benchmarks/host_parts.py --in-turn --turns 3 --out rows.jsonl

The second takes models and reference steps on the host as it is and on a slow one (``slow_host.py``) in turn.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from program_ops import PROGRAMS, import_libraries, program, seen_whole
from slow_host import other, slowed
from torch import nn
from torch.nn import functional
from whole_steps import COMPILED, MODELS, Measured, Run

from tilefit.cost.launch import REFERENCE_STEP_S
from tilefit.measure.launch import launch_scale, reference_step

IN_A_ROW, REPEATS = int(os.environ.get("IN_A_ROW", 40)), 9
#: Samples and tokens of a model: so few that the host is the slower. Norms over a batch need two.
SMALL = {"batch": 2, "seq": 64}
#: Models that are not measured: their sizes are their own, and large, or they do not learn eagerly.
LEFT_OUT = ("lstm_lm", "segmenter", "points", "registration", "resolution", "wave", "words", "graph", "fcn")
#: Those measured on a slow host, too.
SLOW = ("gpt2", "t5", "swin", "resnet50", "efficientnet", "unet", "recommender", "densenet")
#: Times as slow a host that has one core, of which nearly nothing is taken.
ONE_CORE = 1.01
_Layer = Callable[[torch.Tensor], torch.Tensor]


def layers() -> dict[str, tuple[tuple[int, ...], Callable[[], _Layer]]]:
    """By name: the shape that it takes and gives, and what makes one."""
    square, image, heads = (64, 64), (2, 8, 8, 8), (1, 2, 16, 32)

    def of(function: _Layer) -> Callable[[], _Layer]:
        return lambda: function

    def merged(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x)).narrow(0, 0, 64)

    return {
        "nothing": (square, of(lambda x: x)),
        "module": (square, nn.Identity),
        "two modules": (square, lambda: nn.Sequential(nn.Identity())),
        "view": (square, of(lambda x: x.view(64, 64))),
        "transpose": (square, of(lambda x: x.transpose(0, 1))),
        "index": (square, of(lambda x: x[:, :64])),
        "expand": (square, of(lambda x: x.expand(64, 64))),
        "unsqueeze, squeeze": (square, of(lambda x: x.unsqueeze(0).squeeze(0))),
        "add": (square, of(lambda x: x + x)),
        "add a number": (square, of(lambda x: x + 1.0)),
        "multiply in place": (square, of(lambda x: x.clone().mul_(2.0))),
        "relu": (square, of(functional.relu)),
        "gelu": (square, of(functional.gelu)),
        "gelu module": (square, nn.GELU),
        "softmax": (square, of(lambda x: x.softmax(-1))),
        "dropout": (square, lambda: nn.Dropout(0.1)),
        "mean": (square, of(lambda x: x.mean(-1, keepdim=True).expand(64, 64))),
        "cast and back": (square, of(lambda x: x.bfloat16().float())),
        "contiguous": (square, of(lambda x: x.t().contiguous())),
        "cat, narrow": (square, of(merged)),
        "masked_fill": (square, of(lambda x: x.masked_fill(x > 0, 0.5))),
        "product": (square, of(lambda x: x @ x)),
        "linear": (square, lambda: nn.Linear(64, 64)),
        "linear without bias": (square, lambda: nn.Linear(64, 64, bias=False)),
        "layer norm": (square, lambda: nn.LayerNorm(64)),
        "conv": (image, lambda: nn.Conv2d(8, 8, 3, padding=1)),
        "conv 1x1 without bias": (image, lambda: nn.Conv2d(8, 8, 1, bias=False)),
        "depthwise conv": (image, lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)),
        "batch norm": (image, lambda: nn.BatchNorm2d(8)),
        "batch norm, eval": (image, lambda: nn.BatchNorm2d(8).eval()),
        "pool": (image, of(lambda x: functional.max_pool2d(x, 3, 1, 1))),
        "silu in place": (image, lambda: nn.SiLU(inplace=True)),
        "attention": (heads, of(lambda x: functional.scaled_dot_product_attention(x, x, x))),
    }


def spent_us(call: Callable[[], Any], times: int = 1) -> tuple[float, float, Any]:
    """Wall and processor time of each of so many; the last result."""
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(times):
        out = call()
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return 1e6 * wall_s / times, 1e6 * cpu_s / times, out


class Host:
    """Where it is measured and written."""

    def __init__(self, out: Path, device: str, slow: float = 1.0) -> None:
        self.file, self.device, self.slow = out.open("a"), device, slow
        self.small: dict[str, Callable[[], None]] = {}

    def write(self, **row: Any) -> None:
        self.file.write(json.dumps({**row, "slow": self.slow}) + "\n")
        self.file.flush()

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def reference(self) -> float:
        scale = launch_scale(torch.device(self.device))
        kinds_ms: dict[str, list[float]] = {}
        kinds_cpu_ms: dict[str, list[float]] = {}
        self.small = self.small or small_steps(self.device)
        for name, step in self.small.items():
            for _ in range(3):
                step()
            self.wait()
            spent = []
            for _ in range(12):
                spent.append(spent_us(step)[:2])
                self.wait()
            kinds_ms[name], kinds_cpu_ms[name] = (
                [us / 1e3 for us in each] for each in zip(*spent, strict=True)
            )
        row = {"reference_s": REFERENCE_STEP_S, "kinds_ms": kinds_ms, "kinds_cpu_ms": kinds_cpu_ms}
        self.write(row="reference", scale=scale, at=time.time(), **row)
        return scale

    def timed(self, name: str, call: Callable[[], Any], times: int = 1, repeats: int = REPEATS) -> None:
        """A call that has no parts."""
        found = []
        for _ in range(repeats + 1):
            self.wait()
            found.append(spent_us(call, times)[:2])
        self.write(row="part", name=name, **quartiles(found[1:]))

    def parts(self, autocast: bool, repeats: int) -> None:
        """Each layer's three times, of so many in a row."""
        for name, (shape, make) in layers().items():
            each = [make() for _ in range(IN_A_ROW)]
            for layer in each:
                if isinstance(layer, nn.Module):
                    layer.to(self.device)
            x = torch.randn(shape, device=self.device)
            taken: dict[str, list[tuple[float, float]]] = {"alone": [], "forward": [], "backward": []}
            for _ in range(repeats + 1):
                for part in ("alone", "forward"):
                    start = x.clone() if part == "alone" else x.clone().requires_grad_() * 1.0
                    self.wait()
                    with (
                        torch.set_grad_enabled(part != "alone"),
                        torch.autocast(self.device, torch.bfloat16, enabled=autocast),
                    ):
                        *spent, y = spent_us(lambda start=start, each=each: chained(start, each))
                    taken[part].append((spent[0] / IN_A_ROW, spent[1] / IN_A_ROW))
                loss = y.float().sum()
                self.wait()
                *spent, _ = spent_us(loss.backward)
                taken["backward"].append((spent[0] / IN_A_ROW, spent[1] / IN_A_ROW))
                for layer in each:
                    if isinstance(layer, nn.Module):
                        layer.zero_grad()
            for part, found in taken.items():
                self.write(row="part", name=name, part=part, autocast=autocast, **quartiles(found[1:]))

    def others(self, repeats: int) -> None:
        """Calls that are no layer."""
        x = torch.randn(64, 64, device=self.device)
        own, many = torch.randn(64, 64), [torch.zeros(4, device=self.device) for _ in range(50)]
        self.timed("empty", lambda: torch.empty(64, 64, device=self.device), 100, repeats)
        self.timed("zeros", lambda: torch.zeros(64, 64, device=self.device), 100, repeats)
        self.timed("arange", lambda: torch.arange(64, device=self.device), 100, repeats)
        self.timed("zero_", x.zero_, 100, repeats)
        self.timed("add_", lambda: x.add_(1.0), 100, repeats)
        self.timed("item", lambda: x[0, 0].item(), 20, repeats)
        self.timed("to the GPU", lambda: own.to(self.device), 20, repeats)
        self.timed("foreach of 50", lambda: torch._foreach_mul_(many, 1.5), 20, repeats)
        self.timed("wait", self.wait, 20, repeats)
        self.timed("Python", python, 1, repeats)
        for count in (50, 250):
            tensors = [nn.Parameter(torch.zeros(64, device=self.device)) for _ in range(count)]
            for tensor in tensors:
                tensor.grad = torch.zeros_like(tensor)
            kinds: dict[str, tuple[Any, dict[str, Any]]] = {
                "adamw": (torch.optim.AdamW, {}),
                "adamw fused": (torch.optim.AdamW, {"fused": True}),
                "sgd": (torch.optim.SGD, {"momentum": 0.9}),
            }
            for name, (kind, options) in kinds.items():
                self.timed(f"{name} of {count}", kind(tensors, lr=1e-6, **options).step, 3, repeats)


def small_models() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """A transformer, convolutions and many parameters, with their inputs."""
    encoder = nn.Sequential(
        *(nn.TransformerEncoderLayer(64, 2, 128, activation="gelu", batch_first=True) for _ in range(4))
    )
    images = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(8))
    )
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(30)))
    tokens, pixels = torch.randn(2, 16, 64), torch.randn(2, 8, 8, 8)
    return {"transformer": (encoder, tokens), "convolutions": (images, pixels), "layers": (layers, tokens)}


def small_steps(device: str) -> dict[str, Callable[[], None]]:
    """Steps that could tell how fast the host is: that of ``tilefit calibrate``, and those of small models,
    with training and forward passes alone."""
    made: dict[str, Callable[[], None]] = {"calibrate": reference_step(torch.device(device))}
    for name, (model, data) in small_models().items():
        model.to(device).train()
        inputs = data.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

        def train(model: Any = model, inputs: Any = inputs, optimizer: Any = optimizer) -> None:
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(inputs).float().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        def infer(model: Any = model, inputs: Any = inputs) -> None:
            with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
                model(inputs)

        made |= {name: train, f"{name}, forward": infer}
    return made


def chained(x: torch.Tensor, each: list[_Layer]) -> torch.Tensor:
    for layer in each:
        x = layer(x)
    return x


def own_work(elements: int = 3_000_000) -> None:
    """Nanoseconds that one element takes one core, in operations on tensors of the host's."""
    torch.set_num_threads(1)
    x = torch.randn(elements)
    calls: dict[str, Callable[[], object]] = {
        "randn": lambda: torch.randn(elements),
        "normal_": x.normal_,
        "rand": lambda: torch.rand(elements),
        "randint": lambda: torch.randint(100, (elements,)),
        "randperm": lambda: torch.randperm(elements),
        "bernoulli_": lambda: x.bernoulli_(0.5),
        "add": lambda: x + x,
        "clone": x.clone,
    }
    for name, call in calls.items():
        least_us = min(spent_us(call)[1] for _ in range(6))
        print(f"{name:12} {1e3 * least_us / elements:6.2f} ns an element")


def python() -> int:
    """Calls, attributes and dictionaries, and nothing of PyTorch."""

    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

        def moved(self, by: int) -> Point:
            return Point(self.x + by)

    point, seen = Point(0), {}
    for index in range(1000):
        point = point.moved(index)
        seen[index % 17] = point
    return len(seen)


def quartiles(found: list[tuple[float, float]]) -> dict[str, float]:
    """Least and median of wall and processor time, in microseconds."""
    wall, cpu = zip(*found, strict=True)
    return {
        "us": min(wall), "median_us": statistics.median(wall),
        "cpu_us": min(cpu), "median_cpu_us": statistics.median(cpu),
    }  # fmt: skip


# ---- models ----------------------------------------------------------------------------------------


def models() -> list[Run]:
    """What is measured, in order."""
    listed: list[tuple[str, bool, dict[str, int]]] = [
        (target, channels_last, {}) for target, _, channels_last in MODELS
    ]
    listed += [(target, channels_last, arguments) for target, _, channels_last, arguments in COMPILED]
    found: dict[str, Run] = {}
    for target, channels_last, arguments in listed:
        sizes = {} if ".py:" in target else SMALL if target.startswith("hf:") else {"batch": 2}
        if any(
            target.endswith(each) for each in ("vit", "swin", "swinv2", "mobilevit", "dinov2", "convnextv2")
        ):
            sizes = {"batch": 2}
        sizes = {**sizes, **({"image_size": 128} if "segformer" in target and "hf:" in target else {})}
        if not any(each in target for each in LEFT_OUT):
            found.setdefault(target, Run(target, sizes, channels_last, arguments=arguments))
    return list(found.values())


class Small(Measured):
    """A model that trains and infers; its weights are never set, which says nothing of their sizes."""

    def parted(self, infer: bool, steps: int, host: Host) -> dict[str, list[list[float]]]:
        """Milliseconds of wall and processor time of each part of each step, from an empty queue."""
        taken: dict[str, list[list[float]]] = {"wall_ms": [], "cpu_ms": [], "whole_ms": []}
        self.model.train(not infer)
        self.of = Run(self.of.target, self.of.sizes, self.of.channels_last, infer=infer)
        for _ in range(steps):
            host.wait()
            walls, cpus = [time.perf_counter()], [time.process_time()]

            def passed(walls: list[float] = walls, cpus: list[float] = cpus) -> None:
                walls.append(time.perf_counter())
                cpus.append(time.process_time())

            with torch.set_grad_enabled(not infer):
                loss = self.forward()
            passed()
            if not infer:
                assert self.optimizer is not None
                loss.backward()
                passed()
                self.optimizer.step()
                self.optimizer.zero_grad()
                passed()
            del loss
            host.wait()
            taken["whole_ms"].append([1e3 * (time.perf_counter() - walls[0])])
            for name, times in (("wall_ms", walls), ("cpu_ms", cpus)):
                taken[name].append([1e3 * (b - a) for a, b in pairwise(times)])
        return taken

    def back_to_back(self, infer: bool, steps: int, host: Host) -> float:
        """Milliseconds of a step among others."""
        trained = self.optimizer
        self.optimizer = None if infer else trained
        host.wait()
        spent = spent_us(self.step, steps)[0] / 1e3
        self.optimizer = trained
        return spent


def loaded(runs: list[Run], device: str, until: float) -> Iterator[tuple[Run, Small]]:
    same = {name: lambda self, *args, **kwargs: self for name in ("normal_", "uniform_", "erfinv_")}
    with patch.multiple(torch.Tensor, **same):
        for run in runs:
            if time.monotonic() > until:
                print(f"{run.label}: no time left", flush=True)
                continue
            try:
                yield run, Small(run, device)
            except Exception as error:  # noqa: BLE001 - one model's failure is told
                print(f"{run.label}: {type(error).__name__}: {error}"[:200], flush=True)


def measure_models(host: Host, made: dict[str, Small], steps: int) -> None:
    """One turn of each."""
    for name, model in list(made.items()):
        try:
            for infer in (False, True):
                model.parted(infer, 2, host)
                taken = model.parted(infer, steps, host)
                whole_ms = model.back_to_back(infer, steps, host)
                host.write(row="model", model=name, infer=infer, sustained_ms=whole_ms, **taken)
        except Exception as error:  # noqa: BLE001 - one model's failure is told
            print(f"{name}: {type(error).__name__}: {error}"[:200], flush=True)
            del made[name]
    gc.collect()
    gc.freeze()


def measure_in_turn(host: Host, runs: list[Run], turns: int, steps: int, slow: float) -> None:
    """Models and reference steps on the host as it is, on one core of it, and on a slow one, time and again:
    what a host takes differs from one second to the next, and medians of many turns by less."""
    few = [run for run in runs if any(part in run.target for part in SLOW)]
    made = {run.label: model for run, model in loaded(few, host.device, inf)}
    for each in (ONE_CORE, slow):
        other(each).send_signal(signal.SIGSTOP)
    for _ in range(turns):
        for host.slow in (1.0, ONE_CORE, slow):
            with slowed(host.slow):
                host.reference()
                measure_models(host, made, steps)


# ---- programs --------------------------------------------------------------------------------------


def run_program(name: str, host: Host, turns: int = 2, steps: int = 4) -> None:
    """Run a program in this process, which ends when turns of its steps were timed."""
    import runpy

    from tilefit.capture.program.contained import contained
    from tilefit.capture.program.fake_data import pretrained
    from tilefit.capture.program.finding import Listener, StepFinder

    path, arguments, fake = program(name)
    began: list[tuple[float, float]] = []
    found: list[tuple[float, float]] = []

    def begin() -> None:
        host.wait()
        began.append((time.perf_counter(), time.process_time()))

    def end() -> None:
        host.wait()
        wall, cpu = began.pop()
        taken = (time.perf_counter() - wall, time.process_time() - cpu)
        found.append((1e3 * taken[0] / steps, 1e3 * taken[1] / steps))
        if len(found) == turns:
            wall_ms, cpu_ms = zip(*found, strict=True)
            scale = launch_scale(torch.device(host.device))
            row = {"wall_ms": wall_ms, "cpu_ms": cpu_ms, "scale": scale, "reference_s": REFERENCE_STEP_S}
            host.write(row="program", program=name, **row)
            os._exit(0)

    told = Listener()
    told.begins, told.ends = begin, end
    finders = [StepFinder(4 + steps * turn, steps, told) for turn in range(turns)]
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    random.seed(0)
    if name == "speech":
        seen_whole()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if fake:
            pretrained._without_initialization = nullcontext
            stack.enter_context(contained(folder, fake=True))
        for finder in finders:
            stack.enter_context(finder.watching())
        runpy.run_path(str(path), run_name="__main__")
    host.write(row="program", program=name, failure=f"it ended after {len(found)} turns")


def measure_programs(host: Host, names: list[str], longest_s: float, until: float) -> None:
    """Each in a copy of this process, which has imported what they need and has not touched the GPU."""
    for name in names:
        import_libraries(program(name)[0])
    for name in names:
        if time.monotonic() > until:
            print(f"{name}: no time left", flush=True)
            continue
        child = os.fork()
        if not child:
            code = 1
            try:
                os.setsid()
                with tempfile.TemporaryFile("w+") as log:
                    os.dup2(log.fileno(), 1)
                run_program(name, host)
            except BaseException as error:  # noqa: BLE001 - a row of the result
                host.write(row="program", program=name, failure=f"{type(error).__name__}: {error}"[:300])
            finally:
                os._exit(code)
        ends = time.monotonic() + longest_s
        while time.monotonic() < ends and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.1)
        if time.monotonic() >= ends:
            os.killpg(child, 9)
            os.waitpid(child, 0)
            print(f"{name}: given up", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--only", nargs="+", default=[""], help="of these names, or parts")
    parser.add_argument("--seconds", type=float, default=225.0)
    parser.add_argument("--slow", type=float, default=3.0, help="times as slow a host, at the end")
    parser.add_argument("--in-turn", action="store_true", help="on both hosts in turn, few models alone")
    parser.add_argument("--own", action="store_true", help="the host's own operations alone")
    options = parser.parse_args()
    if options.own:
        own_work()
        return
    began = time.monotonic()
    print(f"{os.cpu_count()} cores, torch {torch.__version__}", flush=True)
    host = Host(options.out, options.device)
    runs = [run for run in models() if any(part in run.target for part in options.only)]
    if options.in_turn:
        measure_in_turn(host, runs, options.turns, options.steps, options.slow)
        return
    wanted = [name for name in PROGRAMS if any(part in name for part in options.only)]
    measure_programs(host, wanted, 25.0, began + 0.33 * options.seconds)
    print(f"programs: {time.monotonic() - began:.0f} s", flush=True)
    host.reference()
    for autocast in (False, True):
        host.parts(autocast, options.repeats)
    host.others(options.repeats)
    print(f"parts: {time.monotonic() - began:.0f} s", flush=True)
    made = {run.label: model for run, model in loaded(runs, options.device, began + 0.6 * options.seconds)}
    print(f"{len(made)} models: {time.monotonic() - began:.0f} s", flush=True)
    gc.collect()
    gc.freeze()
    for _ in range(options.turns):
        host.reference()
        if time.monotonic() < began + 0.85 * options.seconds:
            measure_models(host, made, options.steps)
    print(f"models: {time.monotonic() - began:.0f} s", flush=True)
    host.slow = options.slow
    few = {name: model for name, model in made.items() if any(part in name for part in SLOW)}
    with slowed(options.slow):
        host.reference()
        measure_models(host, few, options.steps)
        host.reference()
        host.parts(True, 2)
        host.others(2)
    summed_up(options.out)
    print(f"all: {time.monotonic() - began:.0f} s", flush=True)


def summed_up(path: Path) -> None:
    """A short table."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    print("reference", [(row["slow"], round(row["scale"], 2)) for row in rows if row["row"] == "reference"])
    table: dict[str, list[float]] = {}
    for row in rows:
        if row["row"] == "part" and row.get("autocast") is not False:
            table.setdefault(row["name"], []).append(row["us"])
        if row["row"] == "program":
            print(
                row["program"], row.get("failure") or [min(row["wall_ms"]), min(row["cpu_ms"]), row["scale"]]
            )
    for name, times in table.items():
        print(f"{name:24} " + " ".join(f"{each:7.2f}" for each in times))
    print(len({row["model"] for row in rows if row["row"] == "model"}), "models")


if __name__ == "__main__":
    main()
