"""PAR002: gradients are summed up in small messages."""

from __future__ import annotations

from dataclasses import replace

from tilefit.rules.base import Case, Change, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.exchanges import chunks, gradient_sums, merged
from tilefit.rules.finding import SAFE
from tilefit.rules.program.events import listed
from tilefit.units import counted, size


class SmallMessages(Rule):
    """Gradients are summed up over the GPUs in many small messages.

    What it sees: all-reduces of gradients of which several together are no more than 25 MiB.

    Why it costs time: each message has a fixed time, of the GPUs and of the host, and a short one reaches a
    part of the link's bandwidth.

    Arithmetic: the step with neighbours in one message until it has 25 MiB, sent when the last of them is
    there; each message by the protocol that is best for its size.

    Example: 1 MiB over eight H100 takes 27 µs, 25 MiB 168 µs: in messages of 1 MiB they take 680 µs.

    Fix: leave ``bucket_cap_mb`` at its default of 25; in a loop of one's own, gradients that were flattened
    into one tensor.

    Source: Li and others, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020),
    section 3.2.3, on bucketing.
    """

    code = "PAR002"
    title = "gradients summed up in small messages"
    wrong = Case.training(
        """
        distributed.init_process_group("nccl")
        layers = [layer for _ in range(48) for layer in (nn.Linear(512, 512), nn.GELU())]
        net = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to("cuda"), bucket_cap_mb=0.1)
        """,
        4096,
        512,
        "--ranks 8",
    )
    right = wrong.but(", bucket_cap_mb=0.1", "")

    def check(self, context: Context) -> Proposals:
        step = context.step
        found = gradient_sums(step)
        if len(found) < 2:
            return
        exchanges = step.program.exchanges
        parts = chunks(exchanges, found)
        if 2 * len(parts) > len(found):
            return
        lines = list(dict.fromkeys(exchanges[index].site.source for index in found))
        moved = sum(exchanges[index].bytes for index in found)
        yield Proposal(
            place=Place(source=lines[0]),
            message=f"{size(moved)} of gradients are summed up in {counted(len(found), 'message')}: "
            f"{listed(lines)}",
            fix=f"Sum them up in {counted(len(parts), 'message')} of about 25 MiB: the default of "
            "bucket_cap_mb, or flattened into one tensor.",
            safety=SAFE,
            change=Change(step=replace(step, program=merged(step.program, parts))),
            arithmetic=(f"{size(moved / len(found))} a message",),
        )
