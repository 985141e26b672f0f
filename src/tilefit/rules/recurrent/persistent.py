"""RNN003: persistent kernels would run a recurrent layer faster."""

from __future__ import annotations

from dataclasses import replace

from tilefit.cost.cudnn import STANDARD, cudnn_algorithm
from tilefit.cost.recurrent_times import persistent_steps
from tilefit.ops import Recurrent
from tilefit.rules.base import Case, Change, Context, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE
from tilefit.rules.recurrent.layers import exchanged, layers_of_torch


class PersistentKernels(Rule):
    """Persistent kernels would run a recurrent layer faster than cuDNN does.

    What it sees: A layer that cuDNN runs, of a cell, an element type and a size for which the persistent
    kernels of `tilefit.nn` were measured to be faster on this GPU.

    Why it costs time: In each time step cuDNN's standard algorithm launches a product and a pointwise
    kernel, and the product loads the recurrent weights again. The persistent kernels run all time steps in
    one launch and keep the weights on chip.

    Arithmetic: What both take for a time step was measured on an H200, whose figures stand for other GPUs
    of compute capability 9. A size in between counts as the nearest one measured. Layers, and the two
    directions of one, count one after another.

    Example: `model = tilefit.nn.convert(model)` makes every `nn.LSTM`, `GRU` and `RNN` one of `tilefit.nn`,
    with the same parameters and `state_dict`.

    It is the same function but for rounding; under bf16 autocast the layers of `tilefit.nn` compute in bf16,
    where `torch.nn` computes in fp16.

    Source: Diamos et al., "Persistent RNNs: Stashing Recurrent Weights On-Chip" (2016).
    """

    code = "RNN003"
    title = "recurrent layer without persistent kernels"
    wrong = Case("nn.LSTM(1024, 1024, num_layers=2)", "torch.empty(256, 8, 1024)", "--amp bf16")
    right = wrong.but("nn.LSTM", "tilefit.nn.LSTM")

    def check(self, context: Context) -> Proposals:
        step, gpu = context.step, context.gpu
        for op, places in layers_of_torch(step).items():
            steps = persistent_steps(op, gpu)
            if steps is None:
                continue

            def ours(each: Recurrent, kind: str = op.persistent) -> list[Recurrent]:
                return [replace(each, persistent=kind)]

            replaced = exchanged(step, places, ours)
            algorithm = cudnn_algorithm(op, gpu)[0]
            backward = f", {steps.backward_us:.2f} us backward" if steps.backward_us else ""
            row = steps.row
            lines = [
                f"{op.shape}, {op.dtype}: {steps.forward_us:.2f} us a time step forward{backward} by "
                f"persistent kernels (measured with {row.hidden} units, mini-batch {row.batch}, {row.steps} "
                "steps)",
                f"cuDNN: {algorithm}"
                + (", a product and a pointwise kernel per time step" if algorithm == STANDARD else ""),
            ]
            if step.settings.amp == "bf16" and op.dtype == "fp16":
                lines.append("in bf16, as the autocast region says; torch.nn computes in fp16 there")
            yield Proposal(
                place=context.place(indices[0] for _, indices in places),
                message=f"cuDNN's {algorithm} algorithm takes longer than persistent kernels, which keep the "
                "recurrent weights on chip for the whole sequence",
                fix="Run it by persistent kernels: model = tilefit.nn.convert(model).",
                safety=SAFE,
                change=Change(replaced),
                arithmetic=tuple(lines),
            )
