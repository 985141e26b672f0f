"""PRC005: weights cast more often than needed."""

from __future__ import annotations

from tilefit.ops import OPTIMIZER, StepOp
from tilefit.ops.dtypes import HALVES
from tilefit.rules.base import Case, Change, Context, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE, UNSAFE
from tilefit.rules.flow import is_cast
from tilefit.units import size


class WeightCasts(Rule):
    """Autocast casts weights from fp32 that could be cast once.

    What it sees: In inference: any cast of a weight to half precision. In training: casts of a weight
    that was already cast since the optimizer's last step, because the autocast region was left and entered
    again (each exit of the outermost region empties the cache: micro-batches), or because its cache is off.

    Why it costs time: A cast reads 4 bytes and writes 2 per weight and computes nothing. In inference
    with a small batch the weights are most of the traffic: reading them as half moves 2 bytes per weight,
    casting them first 8.

    Arithmetic: 124 million weights cast once more: 0.74 GB, 0.2 ms at 4 TB/s.

    Example: Inference: `model.to(torch.bfloat16)` once, after loading. Training: one
    `torch.autocast` block around all micro-batches' forward passes of a step, not one inside each block.

    Source: PyTorch, `torch.autocast`, `cache_enabled` and the weight cache's lifetime.
    """

    code = "PRC005"
    title = "weights cast more often than needed"
    wrong = Case(
        "nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))",
        "torch.empty(64, 4096)",
        "--amp bf16 --infer",
    )
    right = wrong.but("range(4)))", "range(4))).bfloat16()").but("64, 4096)", "64, 4096).bfloat16()")

    def check(self, context: Context) -> Proposals:
        step = context.step
        seen: set[tuple[str, int, tuple[int, ...]]] = set()
        extra: list[int] = []
        for index, entry in enumerate(step.ops):
            if entry.phase == OPTIMIZER:
                seen.clear()  # the weights are others now, as between the two steps of a GAN
            # What is computed again in the backward pass casts again, whatever regions there are.
            if entry.recomputed or not _is_weight_cast(entry):
                continue
            # Parts of a packed weight are cast one by one.
            part = entry.inputs[0].parameter, entry.inputs[0].offset, entry.inputs[0].shape
            if part in seen or not step.settings.training:
                extra.append(index)
            seen.add(part)
        if not extra:
            return
        entries = [step.ops[index] for index in extra]
        moved = sum(entry.op.moved_bytes for entry in entries)
        half = entries[0].outputs[0].dtype
        training = step.settings.training
        name = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[half]
        once = (
            "Open one torch.autocast region around all forward passes of the step, with its cache on."
            if step.settings.amp
            else "Cast each weight once in a step, and use the result."
        )
        yield Proposal(
            place=context.place(extra),
            message=f"{len(entries):,} casts of weights to {half} repeat one that was already made in this "
            "step"
            if training
            else f"{len(entries):,} weights are cast to {half} in every call",
            fix=once if training else f"Convert the model once: model.to({name}).",
            safety=SAFE if training else UNSAFE,
            change=Change(dict.fromkeys(extra, ())),
            arithmetic=(f"{size(moved)} moved by these casts",),
        )


def _is_weight_cast(entry: StepOp) -> bool:
    return (
        is_cast(entry)
        and bool(entry.inputs[0].parameter)
        and entry.inputs[0].dtype == "fp32"
        and entry.outputs[0].dtype in HALVES
    )
