"""FOR001: a loop over the parameters."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from tilefit.ops import OPTIMIZER, Step, StepOp, Streaming
from tilefit.ops.operations import by_name
from tilefit.ops.streaming import multi_tensor_launches
from tilefit.rules.base import Case, Change, Context, Edits, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE
from tilefit.rules.merging import instead, together
from tilefit.units import count, counted, size

#: So many from one line are a loop, of which so many are alike.
_MANY = 8
_ALIKE = 4
#: The share of them that have a parameter's shape.
_OF_PARAMETERS = 0.9
#: What PyTorch has for lists of tensors: ``torch._foreach_…``, and with a ``_`` behind it in place.
_FORMS = by_name("foreach")
#: What makes one of PyTorch's optimizers loop.
_OPTIMIZER = (
    " One of PyTorch's optimizers loops with foreach=False, and where a parameter has a sparse gradient: "
    "give tables an optimizer of their own."
)
#: Those of PyTorch's that have no other way.
_ALWAYS_LOOP = ("lbfgs", "muon", "sparseadam")


class ParameterLoop(Rule):
    """A Python loop does to each parameter what one multi-tensor operation does to all.

    What it sees: From one line outside of all modules, an operation for each of many tensors that have the
    parameters' shapes: an exponential moving average of the weights, clipping, a norm, a penalty, an
    optimizer written by hand.

    Why it costs time: Each operation is a launch of the host's, and most parameters are so small that the
    GPU has done it long before the next one arrives.

    Arithmetic: One operation for all tensors, in as few kernels as multi-tensor kernels need, that moves the
    same bytes. What PyTorch has no such operation for, such as a comparison, `where` or random numbers, stays
    in the loop.

    Example: `torch._foreach_lerp_(averaged, parameters, 1 - decay)` in place of a loop of `lerp_`;
    `torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(decay))` does that, and
    `nn.utils.clip_grad_norm_` and `clip_grad_value_` do it by themselves.

    Source: PyTorch, `torch.optim` (the argument `foreach`) and `torch.optim.swa_utils`.
    """

    code = "FOR001"
    title = "a loop over the parameters"
    wrong = Case.training(
        """
        from copy import deepcopy

        net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(24))).to("cuda")
        averaged = deepcopy(net).requires_grad_(False)


        @torch.no_grad()
        def average(decay=0.999):
            for mean, value in zip(averaged.parameters(), net.parameters()):
                mean.lerp_(value, 1 - decay)


        """,
        256,
        256,
    ).but("    optimizer.step()", "    optimizer.step()\n    average()")
    right = wrong.but(
        """for mean, value in zip(averaged.parameters(), net.parameters()):
        mean.lerp_(value, 1 - decay)""",
        "torch._foreach_lerp_(list(averaged.parameters()), list(net.parameters()), 1 - decay)",
    )

    def check(self, context: Context) -> Proposals:
        step = context.step
        if not step.program.was_run:
            return
        found = _loops(step)
        in_step = [each for each, loops in found.items() if step.ops[loops[0][0]].phase == OPTIMIZER]
        for source, loops in found.items():
            if in_step == [source] and step.settings.optimizer in _ALWAYS_LOOP:
                continue
            replaced: Edits = {}
            for indices in loops:
                replaced |= instead(indices, *_together(step, indices))
            entries = [step.ops[index] for index in replaced]
            moved = sum(entry.op.moved_bytes for entry in entries)
            each = min(map(len, loops))
            forms = dict.fromkeys(f"torch._foreach_{form}" for entry in entries for form in _forms(entry))
            own = _OPTIMIZER if in_step == [source] else ""  # one of the program's own has several lines
            yield Proposal(
                place=Place(source=source),
                message=f"a loop over {counted(each, 'tensor')} of the parameters' shapes: "
                f"{', '.join(dict.fromkeys(entry.name.removeprefix('aten.') for entry in entries))}",
                fix=f"Do it to all of them at once: {', '.join(forms)}; or PyTorch's own function.{own}",
                safety=SAFE,
                change=Change(replaced),
                arithmetic=(
                    f"{count(len(entries))} launches for {size(moved)}, at once "
                    f"{sum(step_op.op.kernels for ops in replaced.values() for step_op in ops)} kernels",
                ),
            )


def _forms(entry: StepOp) -> tuple[str, ...]:
    """The multi-tensor functions that do an operation to many tensors; none where there are none."""
    name = entry.name.removeprefix("aten.").lstrip("_")
    forms = _FORMS.get(name.rstrip("_"), "")
    return (name,) if forms == "same" else tuple(forms.split())


def _loops(step: Step) -> dict[str, list[list[int]]]:
    """By line, operations of a kind that a loop over parameters makes."""
    shapes = {parameter.shape for parameter in step.parameters.values()}
    alike: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for index, entry in enumerate(step.ops):
        if _may_be_looped(entry):
            alike[entry.site.source, entry.phase, entry.name].append(index)
    loops: dict[str, list[list[int]]] = defaultdict(list)
    for (source, _, _), group in alike.items():
        for indices in _independent(step, group) if source else ():
            fitting = sum(
                any(ref.shape in shapes for ref in (*entry.inputs, *entry.outputs))
                for entry in (step.ops[index] for index in indices)
            )
            if len(indices) >= _ALIKE and fitting >= _OF_PARAMETERS * len(indices):
                loops[source].append(indices)
    return {source: alike for source, alike in loops.items() if sum(map(len, alike)) >= _MANY}


def _independent(step: Step, group: list[int]) -> list[list[int]]:
    """Operations in groups of which none needs what another made: what is iterated for each parameter, as by
    Muon, can be done for all parameters at once, not for all iterations."""
    if len(group) < _ALIKE:
        return []
    members = set(group)
    made: dict[int, int] = {}
    rounds: dict[int, list[int]] = defaultdict(list)
    for index in range(group[0], group[-1] + 1):
        entry = step.ops[index]
        after = max((made.get(ref.id, 0) for ref in entry.inputs), default=0)
        if index in members:
            rounds[after].append(index)
            after += 1
        made |= {ref.id: after for ref in entry.outputs}
    return list(rounds.values())


def _may_be_looped(entry: StepOp) -> bool:
    """Whether it is a small step of the program's own with a multi-tensor function: not autograd's, and no
    zeroing, which GRD001 sees."""
    if not isinstance(entry.op, Streaming) or not _forms(entry) or not entry.op.read_bytes:
        return False
    return not entry.site.module and not entry.phase.startswith("backward")


def _together(step: Step, indices: list[int]) -> list[StepOp]:
    first, op = step.ops[indices[0]], together([step.ops[index] for index in indices]).op
    assert isinstance(op, Streaming)
    sizes = (op.elements for index in indices if isinstance(op := step.ops[index].op, Streaming))
    op = replace(op, kernels=multi_tensor_launches(sizes), inner=0, strided=False, function="")
    return [StepOp(op, first.phase, first.site, f"aten._foreach_{name}") for name in _forms(first)]
