"""GRD003: gradients are reduced in every micro-batch."""

from __future__ import annotations

from tilefit.rules.base import Case, Change, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.exchanges import gradient_sums, last_backward, without, without_ops
from tilefit.rules.finding import SAFE, WARNING
from tilefit.rules.program.habits import habits, made
from tilefit.units import size


class SynchronizedMicroBatches(Rule):
    """Gradients that are still accumulated are summed over the GPUs in every micro-batch.

    What it sees: Under `DistributedDataParallel`, a backward pass that is not the last before the optimizer's
    step, and reduces the gradients all the same.

    Why it costs time: The sum of the gradients over the GPUs is needed once a step. Each further one moves
    all gradients over the link between the GPUs again.

    Arithmetic: The step without the reductions of all micro-batches but the last; of one process there are
    none to price.

    Example: `with net.no_sync():` around all but the last; a trainer's own setting for accumulation does it.

    Source: PyTorch, `torch.nn.parallel.DistributedDataParallel.no_sync`.
    """

    code = "GRD003"
    title = "gradients reduced in every micro-batch"
    wrong = Case.training(
        """
        from contextlib import nullcontext

        distributed.init_process_group("nccl")
        net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).to("cuda")
        net = nn.parallel.DistributedDataParallel(net)
        """,
        1024,
        1024,
        "--ranks 8",
    ).but(
        "    loss = F.mse_loss(net(x), x)\n    loss.backward()",
        "    for micro in range(4):\n        with nullcontext():\n"
        "            loss = F.mse_loss(net(x), x) / 4\n            loss.backward()",
    )
    right = wrong.but("with nullcontext()", "with net.no_sync() if micro < 3 else nullcontext()")

    def check(self, context: Context) -> Proposals:
        step = context.step
        for same in habits(step, "synchronizes_micro_batches"):
            first, _ = last_backward(step)
            sums = [i for i in gradient_sums(step) if step.program.exchanges[i].index < first]
            moved = sum(step.program.exchanges[i].bytes for i in sums)
            program = without(step.program, sums)
            yield Proposal(
                place=Place(source=same[0].site.source),
                message="gradients are summed over the GPUs in every micro-batch"
                + (f": {same[0].detail}" if same[0].detail else ""),
                fix="Accumulate under no_sync() in all micro-batches but the last.",
                safety=SAFE,
                change=Change(step=without_ops(step, set(made(same)), program)) if sums else None,
                severity="" if sums else WARNING,
                arithmetic=(f"{size(moved)} are summed up for nothing",) if sums else (),
            )
