"""ANO001: debugging switches left on."""

from __future__ import annotations

from tilefit.rules.base import Case, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import ADVICE, NOTE, SAFE, WARNING
from tilefit.rules.program.habits import habits, without
from tilefit.rules.program.host_waits import ANOMALY

_BLOCKING, _DETERMINISTIC = "launch_blocking", "deterministic"


class Debugging(Rule):
    """A switch for debugging is on, which slows every step.

    What it sees: `torch.autograd.set_detect_anomaly(True)` and `detect_anomaly()`, `CUDA_LAUNCH_BLOCKING=1`,
    `torch.use_deterministic_algorithms(True)`, `torch.backends.cudnn.deterministic = True`.

    Why it costs time: Anomaly mode looks for NaN in every gradient, which is two kernels and a wait for the
    GPU at each operation of the backward pass, and keeps a stack trace of each operation of the forward pass.
    `CUDA_LAUNCH_BLOCKING` waits for every single kernel, so host and GPU never work at the same time.
    Deterministic algorithms sort where others add atomically, and take slower convolutions.

    Arithmetic: Anomaly mode: the step without its checks and waits; its stack traces are not in the figure.
    `CUDA_LAUNCH_BLOCKING`: the step's operations one after the other, host and GPU, against the slower of
    the two. Deterministic algorithms have no price: which kernels they replace is not captured. Who needs
    them for a result that can be repeated keeps them.

    Example: `torch.autograd.set_detect_anomaly(args.debug)`.

    Source: PyTorch, `torch.autograd.detect_anomaly` ("should be enabled only for debugging"); CUDA C++
    Programming Guide, `CUDA_LAUNCH_BLOCKING`; PyTorch, "Reproducibility".
    """

    code = "ANO001"
    title = "debugging left on"
    wrong = Case.training(
        """
        torch.autograd.set_detect_anomaly(True)
        net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24))).to("cuda")
        """,
        16384,
        1024,
    )
    right = wrong.but("set_detect_anomaly(True)", "set_detect_anomaly(False)")

    def check(self, context: Context) -> Proposals:
        step = context.step
        waits = sum(event.name == ANOMALY for event in step.program.events)
        for first, *others in habits(step, ANOMALY):
            priced = waits or any(each.last > each.first for each in (first, *others))
            yield Proposal(
                place=Place(source=first.site.source),
                message="anomaly mode looks for NaN in every gradient"
                + (f", and waits for the GPU {waits:,} times a step" if waits else ""),
                fix="Turn it on to find a NaN, and off again: set_detect_anomaly(False).",
                safety=SAFE,
                change=without(step, (first, *others), event=ANOMALY) if priced else None,
                severity="" if priced else WARNING,
            )
        for first, *others in habits(step, _BLOCKING):
            yield Proposal(
                place=Place(source=first.site.source),
                message="CUDA_LAUNCH_BLOCKING is set: the host waits for every kernel",
                fix="Unset CUDA_LAUNCH_BLOCKING; it is for finding the line of a CUDA error.",
                safety=SAFE,
                change=without(step, (first, *others)),
            )
        for first, *_ in habits(step, _DETERMINISTIC):
            which = f" ({first.detail})" if first.detail else ""
            yield Proposal(
                place=Place(source=first.site.source),
                message=f"deterministic algorithms are on{which}; what they cost is not known",
                fix="Turn them off where a run need not be repeated to the last bit.",
                safety=ADVICE,
                change=None,
                severity=NOTE,
            )
