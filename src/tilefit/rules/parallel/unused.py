"""PAR006: unused parameters are searched for, and there are none."""

from __future__ import annotations

from dataclasses import replace

from tilefit.ops import FORWARD
from tilefit.ops.program import TO_GPU
from tilefit.rules.base import Case, Change, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.exchanges import without
from tilefit.rules.finding import SAFE
from tilefit.rules.program.habits import habits


class NothingUnused(Rule):
    """Every step searches for parameters that the loss does not use, and there are none.

    What it sees: `DistributedDataParallel` with `find_unused_parameters=True`, all of whose parameters got a
    gradient in the step.

    Why it costs time: before each backward pass the host goes through the whole graph, and behind it the
    processes tell each other what was used. The buckets stay as they were guessed before the first step,
    instead of following the order in which gradients come.

    Arithmetic: the step without that message and its copy. How long the host takes for the graph is not
    known, and left out.

    Example: leave `find_unused_parameters` out. Where some parameters are never used, the next forward pass
    says so; where it is always the same ones, `static_graph=True` searches once.

    Source: PyTorch, `torch.nn.parallel.DistributedDataParallel`, find_unused_parameters.
    """

    code = "PAR006"
    title = "a search for unused parameters"
    wrong = Case.training(
        """
        distributed.init_process_group("nccl")
        net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).to("cuda")
        net = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
        """,
        1024,
        1024,
        "--ranks 8",
    )
    right = wrong.but(", find_unused_parameters=True", "")

    def check(self, context: Context) -> Proposals:
        step = context.step
        for same in habits(step, "finds_nothing_unused"):
            exchanges = step.program.exchanges
            told = [i for i, each in enumerate(exchanges) if each.dtype == "int32" and each.phase != FORWARD]
            places = {exchanges[i].index for i in told}
            events = [
                e
                for e in step.program.events
                if not (e.kind == TO_GPU and e.index in places and not e.blocks)
            ]
            program = without(replace(step.program, events=tuple(events)), told)
            yield Proposal(
                place=Place(source=same[0].site.source),
                message="unused parameters are searched for in every step, and all are used",
                fix="Leave find_unused_parameters out.",
                safety=SAFE,
                change=Change(step=replace(step, program=program)),
            )
