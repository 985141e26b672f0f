"""Assertions for tests: a size that nobody meant fails where it was written.

    >>> import torch
    >>> from tilefit.testing import assert_no_waste
    >>> model = torch.nn.Linear(4096, 4096)
    >>> inputs = torch.empty(8192, 4096)
    >>> assert_no_waste(model, inputs, gpu="a100-80gb", amp="bf16", rules=["ALN", "QNT"])

**Waste** is the share of a step's predicted time that the findings with a *safe* fix would save together:
changes that leave the function the same. No operation's time is counted twice: the step is priced once with
the changes of different operations made together, or with one change of the whole step alone, whichever saves
more (``Report.waste``). Findings that are *unsafe* (another batch or precision may change training) or
*advice* do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tilefit import units
from tilefit.errors import UsageError
from tilefit.report import Report, text
from tilefit.report.concise import line
from tilefit.rules.finding import ERROR, SAFE

if TYPE_CHECKING:
    import torch

    from tilefit.gpus import Gpu

#: What a step may waste unless told otherwise.
MAX_WASTE = 0.05


class WasteError(AssertionError):
    """A step wastes more than it may, or cannot run on the GPU; its text is the concise findings.

    Attributes:
        report: The report of the check.
    """

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


def assert_no_waste(
    model: torch.nn.Module | Callable[..., Any],
    inputs: Any = None,
    *,
    gpu: str | Gpu | Sequence[str | Gpu] | None = None,
    max_waste: float | str = MAX_WASTE,
    rules: Sequence[str] = (),
    **options: Any,
) -> None:
    """Fail where a step wastes more of a GPU than it may. No GPU is needed, and nothing is computed.

    Args:
        model: As of :func:`tilefit.check`.
        inputs: Likewise.
        gpu: Likewise; of several each must pass.
        max_waste: The largest waste allowed, as a share of the step's predicted time (``0.05``) or in per
            cent (``"5%"``). This module's documentation says what waste is.
        rules: Codes of the rules that count, or their beginnings, such as ``["ALN", "QNT"]`` for sizes
            alone; all where empty.
        options: Further options of :func:`tilefit.check`, such as ``train``, ``amp``, ``compile`` and
            ``ignore``.

    Raises:
        WasteError: The waste is above ``max_waste``, or a finding says that the step cannot run on the GPU at
            all (it does not fit its memory).
        TilefitError: An argument cannot be understood, or the step cannot be captured.
    """
    from tilefit.session import check

    allowed = share(max_waste)
    asked: Any = gpu
    for report in check(model, inputs, gpu=asked, select=rules, **options).reports:
        broken = [finding for finding in report.findings if finding.severity == ERROR]
        if broken or report.waste > allowed:
            raise WasteError(_message(report, allowed), report)


def share(value: float | str) -> float:
    """``"5%"``, ``"5 %"`` or ``0.05`` as a share.

    Raises:
        UsageError: it is none, or not between 0 and 1.
    """
    try:
        number = float(value.strip().removesuffix("%")) if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, str) and value.strip().endswith("%"):
        number /= 100
    if not 0 <= number <= 1:
        raise UsageError(
            f"max_waste is {value!r}", hint='Give a share of the step, such as "5%" or 0.05, from 0 to 1.'
        )
    return number


def _message(report: Report, allowed: float) -> str:
    """The verdict, and the findings behind it, two lines each."""
    counted = [f for f in report.findings if f.safety == SAFE or f.severity == ERROR]
    lines = [
        f"{text.heading(report)} on {text.plain(report.device.title)}: safe changes would save "
        f"{units.share(report.waste)} of {units.seconds(report.step.time_s)}, at most {units.share(allowed)} "
        "may be wasted"
    ]
    for finding in counted:
        lines += [f"  {line(report, finding)}", f"    {text.plain(finding.fix)}"]
    return "\n".join([*lines, f"  tilefit rule {counted[0].code} explains the first."])
