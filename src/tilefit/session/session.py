"""The stages of a check, each made when it is first asked for, and kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from tilefit.assessment import Assessment
from tilefit.cost import fuse
from tilefit.cost.priced import PricedGpu
from tilefit.ops import Step
from tilefit.options import Selection, Split
from tilefit.parallel import rank_step, split_step
from tilefit.report import Comparison, Report


class Session:
    """One check of one program.

    Args:
        capture: Makes the step, as it is written.
        gpus: What it is priced on.
        selection: Which findings are wanted.
        split: How several GPUs share it; the check is then of the rank with the most work.
    """

    def __init__(
        self,
        capture: Callable[[], Step],
        gpus: Sequence[PricedGpu],
        selection: Selection | None = None,
        split: Split | None = None,
    ) -> None:
        self.gpus = tuple(gpus)
        self.selection = selection or Selection()
        self.split = split or Split()
        self._capture = capture

    @cached_property
    def step(self) -> Step:
        """What a GPU executes.

        Raises:
            TilefitError: the step cannot be captured, or not be split this way.
        """
        step = self._capture()
        if not self.split.is_trivial:
            step = rank_step(split_step(step, self.split), self.gpus)
        return fuse(step) if step.settings.compiled else step

    @cached_property
    def assessments(self) -> tuple[Assessment, ...]:
        """The step on each GPU."""
        return tuple(Assessment(self.step, gpu, self.selection) for gpu in self.gpus)

    @property
    def report(self) -> Report | Comparison:
        """Of the GPU; of several, side by side."""
        reports = tuple(assessment.report for assessment in self.assessments)
        return reports[0] if len(reports) == 1 else Comparison(reports)
