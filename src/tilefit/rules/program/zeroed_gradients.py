"""GRD001: gradients are zeroed."""

from __future__ import annotations

from collections.abc import Sequence

from tilefit.ops import Step, StepOp, Streaming, TensorRef
from tilefit.rules.base import Case, Change, Context, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE
from tilefit.units import counted, size

_IN_PLACE = ("aten.zero_", "aten.fill_")


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
    right = Case.training(
        'net = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(24))).to("cuda")', 256, 2048
    )
    wrong = right.but("zero_grad()", "zero_grad(set_to_none=False)")

    def check(self, context: Context) -> Proposals:
        step = context.step
        if not step.program.was_run:
            return
        zeroed = [index for index, entry in enumerate(step.ops) if _zeroes_gradients(step, entry)]
        added = _added_to_zero(step, zeroed[0]) if zeroed else []
        # What no gradient is added to, such as a buffer that is cleared, is no gradient.
        sums = {ref.id for index in added for ref in step.ops[index].outputs}
        zeroed = [i for i in zeroed if not sums.isdisjoint(_written(step.ops[i]) or sums)]
        if not zeroed:
            return
        moved = sum(step.ops[index].op.moved_bytes for index in (*zeroed, *added))
        yield Proposal(
            place=context.place(zeroed[:1]),
            message=f"gradients are filled with zeros, and {counted(len(added), 'time')} added to",
            fix="Drop them: zero_grad(set_to_none=True), the default.",
            safety=SAFE,
            change=Change(dict.fromkeys((*zeroed, *added), ())),
            arithmetic=(f"{counted(len(zeroed) + len(added), 'operation')}, {size(moved)} moved",),
        )


def _zeroes_gradients(step: Step, entry: StepOp) -> bool:
    """Whether an operation writes zeros to tensors of the parameters' shapes, outside of all modules."""
    if not isinstance(entry.op, Streaming) or entry.site.module or entry.op.read_bytes:
        return False
    if entry.op.function == "_foreach_zero":  # does not say to which
        return True
    # A new tensor of zeros is no gradient's: those are written in place.
    return entry.name.startswith(_IN_PLACE) and _is_gradient(step, entry.outputs)


def _written(entry: StepOp) -> set[int]:
    """Numbers of what it writes; none of a multi-tensor operation, which does not say."""
    return {ref.id for ref in entry.outputs}


def _is_gradient(step: Step, tensors: Sequence[TensorRef]) -> bool:
    shapes = {parameter.shape for parameter in step.parameters.values() if parameter.trainable}
    return bool(tensors) and all(ref.shape in shapes and not ref.parameter for ref in tensors)


def _added_to_zero(step: Step, start: int) -> list[int]:
    """Additions to gradients that autograd would have put there: the first to each in the backward pass."""
    first: dict[int, int] = {}
    for index, entry in enumerate(step.ops[start:], start):
        if (
            entry.phase.startswith("backward")
            and entry.name.startswith("aten.add_")
            and {ref.id for ref in entry.outputs} <= {ref.id for ref in entry.inputs}
            and _is_gradient(step, entry.outputs)
        ):
            first.setdefault(entry.outputs[0].id, index)
    return list(first.values())
