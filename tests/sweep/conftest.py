"""Captures of hand-made steps, in place of a child process."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import pytest

from builders import StepBuilder
from tilefit.errors import CaptureError, TilefitError
from tilefit.ops import Memory, Step
from tilefit.options import TargetOptions


class Fake:
    """Runs captures by a function; remembers what was asked for, a list for each start."""

    def __init__(self, step_of: Callable[[TargetOptions], Step]) -> None:
        self.step_of = step_of
        self.starts: list[list[TargetOptions]] = []

    @property
    def asked(self) -> int:
        return sum(map(len, self.starts))

    def __call__(
        self, target: str, options: Sequence[TargetOptions], timeout_s: float
    ) -> Generator[Step | TilefitError]:
        run: list[TargetOptions] = []
        self.starts.append(run)
        for each in options:
            run.append(each)
            try:
                yield self.step_of(each)
            except CaptureError:
                raise  # the process died
            except TilefitError as error:
                yield error


def mlp(options: TargetOptions) -> Step:
    """A layer of ``hidden`` features (64 by default); each sample takes 1 GiB."""
    hidden = int(options.arguments.get("hidden", 64))
    if hidden % 8:
        raise TilefitError(f"{hidden} features do not divide into 8 heads")
    batch, seq = options.batch or 16, options.seq or 128
    b = StepBuilder(batch, "bf16" if options.amp else "fp32")
    b.linear("fc", batch * seq, hidden, 4 * hidden)
    b.optimizer()
    return b.step(memory=Memory(1 << 30, 1 << 30, 2 << 30, 0, 0, (4 + batch) << 30))


@pytest.fixture
def fake() -> Fake:
    return Fake(mlp)
