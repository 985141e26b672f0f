"""What the parts of `recurrent.py` share: settings, layers in pairs, timing, compiling ahead."""

from __future__ import annotations

import copy
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import tilefit.nn as tnn
from tilefit.rnn.cells import CELLS as KERNEL_CELLS
from tilefit.rnn.persistent import build, launch
from tilefit.rnn.persistent.choice import chosen
from tilefit.rnn.persistent.layer import ELEMENTS, _padded
from tilefit.rnn.persistent.variant import Problem

Run = Callable[[], object]
Row = dict[str, Any]
_Case = TypeVar("_Case")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CELLS = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "rnn": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}
#: What the kernels call them.
NAMES = {"lstm": "lstm", "gru": "gru", "rnn": "rnn_tanh", "relu": "rnn_relu"}


#: Calls between two events: back to back, as in a training loop, so that the host works ahead of the GPU.
CALLS = 3


#: Below this ratio contenders are timed again, eight times as often or for so many seconds: a busy host must
#: not decide.
CLOSE, CLOSE_S = 1.1, 0.6


@dataclass
class Setting:
    """Where and how long a part runs.

    Attributes:
        device: ``cuda``, or ``cpu`` for a dry run, where ours is the plain PyTorch reference.
        tiny: Sizes that only show that everything runs.
        rounds: Times each contender is timed; None: what the part takes by itself.
        budget_s: Seconds after which a part starts nothing new.
    """

    device: torch.device
    tiny: bool
    rounds: int | None
    budget_s: float
    started: float = field(default_factory=time.perf_counter)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def ours(self) -> str | None:
        """The backend our layers are told to use: on a GPU the one they choose."""
        return None if self.on_gpu else "reference"

    def left_s(self) -> float:
        return self.budget_s - (time.perf_counter() - self.started)

    def within(self, cases: list[_Case]) -> Iterator[_Case]:
        """The cases for which there is time; says how many there was none for."""
        for index, case in enumerate(cases):
            if self.left_s() < 0:
                print(f"out of time: {len(cases) - index} of {len(cases)} cases not run", flush=True)
                return
            yield case

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def random(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(dtype)

    def pair(
        self, cell: str, dtype: torch.dtype, inputs: int, hidden: int, **options: object
    ) -> tuple[nn.Module, nn.Module]:
        """torch's layer and ours, with the same weights."""
        kind, extra = CELLS[cell]
        theirs = kind(inputs, hidden, device=self.device, dtype=dtype, **extra, **options)
        return theirs, tnn.convert(copied(theirs), backend=self.ours)

    def interleaved(
        self,
        contenders: dict[str, Run],
        rounds: int,
        *,
        wall: bool = False,
        warm_ups: int = 2,
        close: Iterable[tuple[str, str]] = (),
    ) -> dict[str, float]:
        """Microseconds of each contender, by CUDA events, or the wall clock of synchronised runs: the lower
        quartile of its times, since what else runs on the host can only make a call slower.

        All are timed again where of one of the ``close`` pairs the second is not clearly faster.
        """
        for run in contenders.values():
            for _ in range(warm_ups):
                run()
        found = self._quartiles(contenders, self.rounds or rounds, wall)
        if self.rounds is None and any(found[theirs] / found[ours] < CLOSE for theirs, ours in close):
            affordable = int(CLOSE_S * 1e6 / (sum(found.values()) * CALLS))
            found = self._quartiles(contenders, max(rounds, min(8 * rounds, affordable)), wall)
        return found

    def _quartiles(self, contenders: dict[str, Run], rounds: int, wall: bool) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, run in contenders.items():
                times[name].append(self._once(run, wall or not self.on_gpu))
        return {name: lower_quartile(values) for name, values in times.items()}

    def _once(self, run: Run, wall: bool) -> float:
        self.synchronize()
        if wall:
            started = time.perf_counter()
            run()
            self.synchronize()
            return (time.perf_counter() - started) * 1e6
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(CALLS):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / CALLS

    def captured(self, run: Run) -> Run:
        """The replay of a run's CUDA graph; on the CPU, which has none, the run.

        What is returned holds the run, whose inputs the graph reads where they lay when it was captured.
        """
        if not self.on_gpu:
            return run
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()

        def replay(held: Run = run) -> None:
            graph.replay()

        return replay

    def compile_ahead(self, problems: Iterable[Problem], *, jitter: bool = False) -> None:
        """Compiles kernels on all processors: a user meets one or two of them, a benchmark hundreds."""
        if not self.on_gpu:
            return
        capacity, capability = launch.capacity(0), torch.cuda.get_device_capability()
        jobs = set()
        for problem in problems:
            variant = chosen(problem, capacity)
            if variant is not None:
                constants = variant.constants(problem, jitter=jitter)
                jobs.add(("backward" if problem.backward else "forward", tuple(constants.items())))
        if not jobs:
            return
        with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool:
            list(pool.map(_compile, [(name, dict(constants), capability) for name, constants in jobs]))


def lower_quartile(values: list[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


def copied(model: nn.Module) -> nn.Module:
    """A copy whose recurrent weights lie together, as cuDNN wants them: a mere copy's do not."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return model


def _compile(job: tuple[str, dict[str, int], tuple[int, int]]) -> None:
    build.binary(*job)


def problems(
    cell: str,
    dtype: torch.dtype,
    hidden: int,
    batch: int,
    *,
    directions: int = 1,
    training: bool = True,
    lengths: bool = False,
    resets: bool = False,
) -> list[Problem]:
    """What the kernels of a layer are compiled for."""
    size = _padded(hidden, dtype)
    return [
        Problem(
            KERNEL_CELLS[NAMES[cell]], ELEMENTS[dtype], size, batch, directions, backward, lengths, resets
        )
        for backward in ((False, True) if training else (False,))
    ]


def runs(layer: nn.Module, x: Tensor, grad: Tensor, kind: str) -> Run:
    """A forward pass without gradients, or (``"both"``) one with the gradients of input and parameters."""
    parameters = list(layer.parameters())

    def forward() -> object:
        with torch.no_grad():
            return layer(x)[0]

    def both() -> object:
        return torch.autograd.grad(layer(x)[0], [x, *parameters], grad)

    return forward if kind == "forward" else both


def backend_of(layer: nn.Module) -> str:
    """The backend that the last call of a layer of ours ran on."""
    return str(layer.explain().backend)


def geomean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logarithms)) if logarithms else float("nan")


def table(head: str, rows: Iterable[Iterable[object]]) -> None:
    """Prints columns as wide as they need be."""
    lines = [head.split("|"), *([str(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)).rstrip())
