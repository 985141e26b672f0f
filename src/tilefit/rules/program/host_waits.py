"""SYN001: the host waits for the GPU."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.ops import HostEvent
from tilefit.rules.base import Case, Context, Place, Proposal, Rule
from tilefit.rules.finding import ADVICE, SAFE
from tilefit.rules.outside.optimizer import FUSED
from tilefit.rules.program.events import listed, named, waits, without_events
from tilefit.units import counted, seconds

#: The read of a ``GradScaler``, and the reads of anomaly mode, which has a rule of its own.
FOUND_INF, ANOMALY = "found_inf", "detect_anomaly"
#: What has as many elements as values say.
_SIZED = {"nonzero", "masked_select", "index", "where", "unique", "unique_consecutive", "repeat_interleave"}
_ON_GPU = "Leave shapes to sizes: torch.where, or a product with the mask, in place of an index by it."
_LATER = "Keep it on the GPU (total += loss.detach()) and read it every hundredth step."


class HostWaits(Rule):
    """The host waits for the GPU in every step, and the GPU then for the host.

    What it sees: A value of a GPU tensor that the program reads between two steps of the optimizer:
    `loss.item()`, `print(loss)`, `if torch.isnan(loss)`, `.cpu()`, an index by a mask, `synchronize()`.

    Why it costs time: The host launches ahead of the GPU. A value is there when all has run that was launched
    before, so the host waits, and what it would have launched meanwhile comes late: the queue is empty, and
    the GPU does nothing until it fills again.

    Arithmetic: The step is gone through in order with the host's clock and the GPU's. At a wait the host's
    becomes the GPU's; without waits the slower of the two sets the pace. All reads that need not be are taken
    out at once: of several, one alone often gains nothing, since the next one waits as long.

    Not every read can go. `GradScaler` reads whether a gradient was infinite before it lets the optimizer
    step; a fused optimizer does that on the GPU. That read is a finding of its own, and of an optimizer
    without a fused form it is none.

    Example: `total += loss.detach()` in each step and `total.item()` every hundredth, in place of
    `total += loss.item()`.

    Source: PyTorch, "Performance Tuning Guide", avoid unnecessary CPU-GPU synchronization;
    `torch.amp.GradScaler`.
    """

    code = "SYN001"
    title = "the host waits for the GPU"
    wrong = Case(
        program="""
        import torch
        from torch import nn
        from torch.nn import functional as F

        layers = [nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU()) for _ in range(24)]
        net = nn.Sequential(*layers).to("cuda")
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        x = torch.randn(16384, 512, device="cuda")
        total = 0.0
        for step in range(100):
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), x)
            loss.backward()
            optimizer.step()
            total += loss.item()
        """
    )
    right = wrong.but("loss.item()", "loss.detach()")

    def check(self, context: Context) -> Iterator[Proposal]:
        program = context.step.program
        if program is None:
            return
        read = [event for event in program.events if waits(event) and event.name != ANOMALY]
        scaler = [event for event in read if event.name == FOUND_INF]
        avoidable = [event for event in read if event.name != FOUND_INF]
        if avoidable:
            yield self._avoidable(context, avoidable, len(scaler))
        settings = context.step.settings
        if scaler and settings.optimizer in FUSED and not settings.fused_optimizer:
            yield Proposal(
                place=Place(source=scaler[0].site.source),
                message="GradScaler reads whether a gradient is infinite before each step of the optimizer",
                fix="Pass fused=True to the optimizer, which then skips such a step on the GPU.",
                safety=SAFE,
                change=without_events(context.step, scaler),
            )

    def _avoidable(self, context: Context, avoidable: list[HostEvent], others: int) -> Proposal:
        sized = [event for event in avoidable if event.name in _SIZED]
        estimate = context.estimate
        lines = [
            f"host {seconds(estimate.host_time_s)}, GPU {seconds(estimate.gpu_time_s)}, one after the other "
            f"where it waits: {seconds(estimate.time_s)}"
        ]
        if others:
            lines.append("GradScaler's own read stays")
        fixes = [_LATER] * (len(sized) < len(avoidable)) + [_ON_GPU] * bool(sized)
        return Proposal(
            place=Place(source=avoidable[0].site.source),
            message=f"the host waits for the GPU {counted(len(avoidable), 'time')} a step: "
            f"{listed(named(avoidable))}",
            fix=" ".join(fixes),
            safety=ADVICE,
            change=without_events(context.step, avoidable),
            arithmetic=tuple(lines),
        )
