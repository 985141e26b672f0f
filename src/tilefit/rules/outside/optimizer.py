"""NTC003: unfused optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from tilefit.ops import OPTIMIZER, Step, StepOp, Streaming
from tilefit.ops.streaming import multi_tensor_launches
from tilefit.rules.base import Case, Change, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE
from tilefit.units import count, size

#: Optimizers with a fused kernel on CUDA (torch.optim, the ``fused`` argument).
FUSED = ("adam", "adamw", "sgd", "adagrad")
_SCALER = "non_finite_check_and_unscale"
_NORMS = ("aten._foreach_norm", "aten.linalg_vector_norm")
_MULTIPLIES = ("aten._foreach_mul_", "aten.mul_")


class UnfusedOptimizer(Rule):
    """The optimizer runs as a series of kernels that each stream all parameters.

    What it sees: An Adam, AdamW, SGD or Adagrad step without `fused=True`: PyTorch's default runs one
    multi-tensor kernel per arithmetic operation of the update rule.

    Why it costs time: The update is a dozen operations on each element. One kernel reads the parameter,
    its gradient and its state once and writes them once; a kernel per operation reads and writes
    intermediate results in memory each time.

    Arithmetic: Fused AdamW in fp32: 16 bytes read and 12 written per parameter. Its multi-tensor form
    moves 2 to 3 times as much in eight kernels.

    Example: `torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)`.

    Source: PyTorch, `torch.optim.AdamW`, the arguments `foreach` and `fused`.
    """

    code = "NTC003"
    title = "optimizer not fused"
    wrong = Case(
        "nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8)))", "torch.empty(1024, 4096)", "--amp bf16"
    )
    right = wrong.under("--amp bf16 --fused-optimizer")

    def check(self, context: Context) -> Proposals:
        step = context.step
        settings = step.settings
        if settings.fused_optimizer or settings.optimizer not in FUSED:
            return
        unfused = list(_updates(step))
        trained = [p for p in step.parameters.values() if p.trainable]
        if not unfused or not trained:
            return
        elements = sum(prod(p.shape) for p in trained)
        values, state = step.memory.gradient_bytes, step.memory.optimizer_bytes
        launches = multi_tensor_launches(prod(p.shape) for p in trained)
        fused = Streaming(
            "optimizer", elements, 2 * values + state, values + state, "fp32", 12.0, kernels=launches
        )
        entries = [step.ops[index] for index in unfused]
        moved = sum(entry.op.moved_bytes for entry in entries)
        name = f"fused_{settings.optimizer}"
        replaced: dict[int, tuple[StepOp, ...]] = dict.fromkeys(unfused, ())
        replaced[unfused[0]] = (StepOp(fused, OPTIMIZER, entries[0].site, name),)
        yield Proposal(
            place=Place(source=entries[0].site.source),
            message=f"{settings.optimizer} runs as {len(entries):,} multi-tensor operations, not as one",
            fix="Pass fused=True to the optimizer.",
            safety=SAFE,
            change=Change(replaced),
            arithmetic=(
                f"{count(elements)} parameters: {size(moved)} moved, fused {size(fused.moved_bytes)}",
            ),
        )


def _updates(step: Step) -> Iterator[int]:
    """The operations of the optimizers themselves: a scaler's and those that clip gradients stay.

    ``clip_grad_norm_`` takes norms and the norm of these, clamps what the bound makes of it, and multiplies
    as often as it took norms of gradients.
    """
    norms = multiplications = 0
    for index, entry in enumerate(step.ops):
        if entry.phase != OPTIMIZER or _SCALER in entry.name:
            continue
        if entry.name in _NORMS:
            norms += 1
        elif entry.name == "aten.clamp" and norms:
            norms, multiplications = 0, norms - 1
        elif multiplications and entry.name in _MULTIPLIES:
            multiplications -= 1
        elif norms and (entry.name == "aten.stack" or getattr(entry.op, "elements", 0) == 1):
            continue
        else:
            norms = 0
            yield index
