"""GRD001: gradients are zeroed."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.rules.base import Case, Context, Place, Proposal, Rule
from tilefit.rules.finding import NOTE, SAFE
from tilefit.rules.program.habits import habits, made, without
from tilefit.units import counted, size


class ZeroedGradients(Rule):
    """Gradients are filled with zeros instead of dropped.

    What it sees: `zero_grad(set_to_none=False)`, or a loop of `p.grad.zero_()`.

    Why it costs time: Every gradient is written once for nothing, and the backward pass then reads it, adds
    to it and writes it again, parameter by parameter, where it would otherwise only have put its result
    there. The gradients also stay in memory during the forward pass.

    Arithmetic: The step without the zeroing and without the additions.

    Example: `optimizer.zero_grad()`, whose default is `set_to_none=True` since PyTorch 2.0.

    Source: PyTorch, `torch.optim.Optimizer.zero_grad`.
    """

    code = "GRD001"
    title = "gradients zeroed instead of dropped"
    wrong = Case(
        program="""
        import torch
        from torch import nn
        from torch.nn import functional as F

        net = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(24))).to("cuda")
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        x = torch.randn(256, 2048, device="cuda")
        for step in range(100):
            optimizer.zero_grad(set_to_none=False)
            loss = F.mse_loss(net(x), x)
            loss.backward()
            optimizer.step()
        """
    )
    right = wrong.but("set_to_none=False", "set_to_none=True")

    def check(self, context: Context) -> Iterator[Proposal]:
        step = context.step
        for same in habits(step, "keeps_gradients"):
            indices = made(same)
            moved = sum(step.ops[index].op.moved_bytes for index in indices)
            yield Proposal(
                place=Place(source=same[0].site.source),
                message="gradients are filled with zeros, and then added to",
                fix="Drop them: zero_grad(set_to_none=True), the default.",
                safety=SAFE,
                change=without(step, same) if indices else None,
                severity="" if indices else NOTE,
                arithmetic=(f"{counted(len(indices), 'operation')}, {size(moved)} moved",) if indices else (),
            )
