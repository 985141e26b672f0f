"""What fixes gain on the GPU the model is on: steps with more and more of them, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tilefit.capture.real import RealStep
from tilefit.errors import UsageError
from tilefit.fixes.changes.fix import ChangeSet, applied
from tilefit.fixes.changes.run import Run

#: Time that one variant's turn aims at: long enough for the host to get ahead of the GPU, as in training.
TURN_S = 0.2
ROUNDS = 7
_MOST_STEPS = 50
#: Steps before a time is taken: what a fix captures or compiles, it has by then.
_WARM_STEPS = 3


@dataclass(frozen=True, slots=True)
class Gain:
    """What one variant of a step saved over another: the median over the rounds, and an interval of it.

    The second least and the second largest of seven differences hold their median between them in seven of
    eight cases, however they are distributed (the binomial distribution: 1 - 2 (1 + 7) / 2^7).
    """

    time_s: float
    low_s: float
    high_s: float

    @classmethod
    def between(cls, before_s: Sequence[float], after_s: Sequence[float]) -> Gain:
        """Of the times of the same rounds."""
        saved = sorted(before - after for before, after in zip(before_s, after_s, strict=True))
        return cls(statistics.median(saved), saved[1], saved[-2])


def step_times_s(
    run: Run,
    candidates: Sequence[ChangeSet],
    *,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Wall time of a step in each round: without any of the candidates, with the first, the first two, and
    so on.

    The variants take turns, back and forth, so that a drift of the clock meets them all. Afterwards the model
    has none of the candidates; its parameters, buffers and gradients are as they were, and so is the state of
    the random number generators. The optimizer's work is done with a learning rate of zero.

    Raises:
        RefusedError: a candidate does not apply.
    """
    counts = list(range(len(candidates) + 1))
    times: list[list[float]] = [[] for _ in counts]
    with run.kept(), each_compiled_anew():
        run.model.train(run.options.train)
        optimizers: dict[Any, torch.optim.Optimizer] = {}
        steps = []
        for count in counts:
            with applied(run, candidates[:count]):
                steps.append(RunningStep(run, optimizers))
                steps[-1].fill(TURN_S, _MOST_STEPS, clock)
        for number in range(rounds):
            for count in counts if number % 2 == 0 else reversed(counts):
                with applied(run, candidates[:count]):
                    times[count].append(steps[count].timed_s(clock))
    return times


@contextmanager
def each_compiled_anew() -> Iterator[None]:
    """Within the block, variants of a step are compiled as each would be in a process of its own.

    What differs from one variant to the next, as a padded width, is otherwise taken for a size that changes
    from call to call, and from then on compiled as such: a network of inverted residuals with padded channels
    took 86 ms instead of 35 on an H100.
    """
    import torch._dynamo

    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        yield


def require_cuda(run: Run) -> None:
    """Check that the model can be measured.

    Raises:
        UsageError: it is not on a CUDA GPU.
    """
    devices = {parameter.device.type for parameter in run.model.parameters()}
    if devices != {"cuda"}:
        raise UsageError(
            f"the model is on {' and '.join(sorted(devices)) or 'no device'}; times are measured on a GPU",
            hint='Move model and inputs there, .to("cuda"), or leave measure out.',
        )


class RunningStep(RealStep):
    """The step of a run, some number of which (``many``) make a turn."""

    def __init__(self, run: Run, optimizers: dict[Any, torch.optim.Optimizer] | None = None) -> None:
        device = next(run.model.parameters()).device
        super().__init__(run.model, run.inputs, run.loss, run.options, device, optimizers)
        self.many = 1

    def timed_s(self, clock: Callable[[], float]) -> float:
        """The time of a step, over ``many``, once it is warm."""
        for _ in range(_WARM_STEPS):  # also what other variants left in caches
            self()
        self.synchronize()
        return self.turn_s(clock)

    def turn_s(self, clock: Callable[[], float]) -> float:
        """The time of a step, over ``many`` that run back to back."""
        start = clock()
        for _ in range(self.many):
            self()
        self.synchronize()
        return (clock() - start) / self.many

    def fill(self, turn_s: float, most: int, clock: Callable[[], float]) -> None:
        """Make ``many`` as many as take so long, at most so many."""
        once_s = self.timed_s(clock)
        self.many = max(1, min(most, round(turn_s / once_s))) if once_s > 0 else most

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
