"""PAR003: gradients are summed up after the backward pass."""

from __future__ import annotations

from dataclasses import replace

from tilefit.ops import BACKWARD_DATA, Exchange, Site, StepOp, Streaming
from tilefit.ops.dtypes import size_bytes
from tilefit.ops.program import EXCHANGE
from tilefit.rules.base import Case, Change, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.exchanges import beside, chunks, gradient_sums, last_backward, without
from tilefit.rules.finding import SAFE
from tilefit.units import counted, seconds, size


class SumsBehind(Rule):
    """Gradients are summed up over the GPUs after the backward pass, and the GPU does nothing meanwhile.

    What it sees: all-reduces of gradients that are called when the backward pass is over.

    Why it costs time: the gradient of the last layer is there long before that of the first. Summed up as
    soon as it is there, on a stream of its own, it takes no time of the step's as long as the backward pass
    goes on.

    Arithmetic: the step with the same bytes in messages of 25 MiB, sent in equal distances over the backward
    pass, and awaited at its end, with copies of the gradients into them and out. What of the last message
    lies behind the pass stays.

    Example: ``for p in net.parameters(): distributed.all_reduce(p.grad)`` behind ``loss.backward()``.

    Fix: ``DistributedDataParallel``, which sums up while the backward pass runs.

    Source: Li and others, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020),
    section 3.2.3, on overlapping.
    """

    code = "PAR003"
    title = "gradients summed up after the backward pass"
    _plain = Case.training(
        """
        distributed.init_process_group("nccl")
        layers = [layer for _ in range(12) for layer in (nn.Linear(4096, 4096), nn.GELU())]
        net = nn.Sequential(*layers).to("cuda")
        """,
        8192,
        4096,
        "--ranks 8",
    )
    wrong = _plain.but(
        "    optimizer.step()",
        "    for parameter in net.parameters():\n"
        "        distributed.all_reduce(parameter.grad)\n    optimizer.step()",
    )
    right = _plain.but(
        'nn.Sequential(*layers).to("cuda")',
        'nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to("cuda"))',
    )

    def check(self, context: Context) -> Proposals:
        step, streams = context.step, context.estimate.streams
        first, last = last_backward(step)
        if streams is None or not last:
            return
        exchanges = step.program.exchanges
        behind = {each.number for each in step.program.order if each.kind == EXCHANGE and each.index >= last}
        found = [index for index in gradient_sums(step) if index in behind]
        exposed_s = sum(streams.exposed_s[index] for index in found)
        # Of those that are sent on the way the last is behind the pass, too.
        if not found or len(found) == 1 < len(gradient_sums(step)) or not exposed_s:
            return
        parts = chunks(exchanges, reversed(found))  # gradients come from the last layer on
        moved = sum(exchanges[index].bytes for index in found)
        added = [
            (
                first + round((last - first) * (number + 1) / len(parts)),
                last,
                replace(exchanges[part[0]], bytes=sum(exchanges[index].bytes for index in part)),
            )
            for number, part in enumerate(parts)
        ]
        # Gradients are copied into the messages, and out of them.
        copies = [StepOp(_copy(exchanges[index]), BACKWARD_DATA, Site(), "aten.copy_") for index in found] * 2
        ops = (*step.ops[:last], *copies, *step.ops[last:])
        program = beside(without(step.program, found), added)
        program = program.moved(lambda index: index + len(copies) * (index > last))
        yield Proposal(
            place=Place(source=exchanges[found[0]].site.source),
            message=f"{size(moved)} of gradients are summed up over {exchanges[found[0]].ranks} GPUs in "
            f"{counted(len(found), 'message')} when the backward pass is over",
            fix="Wrap the model in DistributedDataParallel, which sums them up while the backward pass runs.",
            safety=SAFE,
            change=Change(step=replace(step, ops=ops, program=program)),
            arithmetic=(f"{seconds(exposed_s)} are waited for; the backward pass is there to hide them",),
        )


def _copy(exchange: Exchange) -> Streaming:
    elements = exchange.bytes // size_bytes(exchange.dtype)
    return Streaming("copy", elements, exchange.bytes, exchange.bytes, exchange.dtype)
