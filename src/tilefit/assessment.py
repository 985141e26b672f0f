"""What a step costs on a GPU and what to change: each stage is made when it is first asked for, and kept."""

from __future__ import annotations

import platform
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import metadata

from tilefit import rules
from tilefit.cost import estimate_step
from tilefit.cost.priced import PricedGpu
from tilefit.ops import Step
from tilefit.options import Selection
from tilefit.report import Report, build
from tilefit.report.build import batch_curve
from tilefit.report.report import Combination
from tilefit.rules import Context, Finding
from tilefit.rules.engine import Found


@dataclass(frozen=True)
class Assessment:
    """A step on a GPU: its price, what is worth changing, the report.

    Attributes:
        step: As it runs: what the compiler makes of it, where it is compiled.
        gpu: With the calibration that prices it.
        selection: Which findings are wanted.
    """

    step: Step
    gpu: PricedGpu
    selection: Selection = field(default_factory=Selection)

    @cached_property
    def context(self) -> Context:
        """The step with its price."""
        return Context(self.step, self.gpu, estimate_step(self.step, self.gpu))

    @cached_property
    def found(self) -> list[Found]:
        """What is worth changing, best first, with the changes that priced it.

        Raises:
            UsageError: a code of the selection fits no rule.
        """
        return rules.find(self.context, self.selection)

    @property
    def findings(self) -> list[Finding]:
        """What is worth changing, best first."""
        return [each.finding for each in self.found]

    @cached_property
    def report(self) -> Report:
        """Everything about the step, as data."""
        step, gpu, estimate = self.step, self.gpu, self.context.estimate
        times_s = rules.combinations(self.context, self.found)
        report = build(
            step,
            gpu,
            estimate,
            self.findings,
            gpu.calibration_title,
            batch_curve=batch_curve(step, gpu, estimate),
            environment=_versions(),
            safe_gain_s=rules.safe_gain_s(self.context, self.found, times_s),
        )
        return replace(report, combinations=tuple(Combination(*each) for each in times_s))


def _versions() -> dict[str, str]:
    """Of Python, of PyTorch, and of the libraries of models that are installed."""
    installed = {"Python": platform.python_version(), "torch": metadata.version("torch")}
    for name in ("torchvision", "timm", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed
