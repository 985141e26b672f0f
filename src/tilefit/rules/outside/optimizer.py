"""NTC003: unfused optimizer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from tilefit.ops import OPTIMIZER, Fallback, Step, StepOp, Streaming
from tilefit.rules.base import Case, Change, Context, Edits, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import SAFE
from tilefit.rules.merging import instead
from tilefit.units import count, size

#: Optimizers with a fused kernel on CUDA (torch.optim, the ``fused`` argument).
FUSED = ("adam", "adamw", "sgd", "adagrad")


class UnfusedOptimizer(Rule):
    """The optimizer runs as a series of kernels that each stream all parameters.

    What it sees: An Adam, AdamW, SGD or (from PyTorch 2.13 on) Adagrad step without `fused=True`: PyTorch's
    default runs one multi-tensor kernel per arithmetic operation of the update rule.

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
        for name, calls in unfused_updates(context.step).items():
            replaced: Edits = {}
            for fused, indices in calls:
                site = replace(context.step.ops[indices[0]].site, fallback=None)
                replaced |= instead(indices, StepOp(fused, OPTIMIZER, site, f"fused_{name}"))
            entries = [context.step.ops[index] for index in replaced]
            moved = sum(entry.op.moved_bytes for entry in entries)
            less = sum(fused.moved_bytes for fused, _ in calls)
            kernels = "one" if len(calls) == 1 else f"{len(calls)}, one a step of its own"
            yield Proposal(
                place=Place(source=entries[0].site.source),
                message=f"{name} runs as {len(entries):,} multi-tensor operations, not as {kernels}",
                fix="Pass fused=True to the optimizer.",
                safety=SAFE,
                change=Change(replaced),
                arithmetic=(
                    f"{count(max(fused.elements for fused, _ in calls))} parameters: {size(moved)} moved, "
                    f"fused {size(less)}",
                ),
            )


def unfused_updates(step: Step) -> dict[str, list[tuple[Streaming, list[int]]]]:
    """By the optimizer's name, its steps: what each would be fused, and its operations."""
    calls: dict[Fallback, list[int]] = defaultdict(list)
    for index, entry in enumerate(step.ops):
        if entry.phase == OPTIMIZER and (call := entry.site.fallback) is not None:
            calls[call].append(index)
    found: dict[str, list[tuple[Streaming, list[int]]]] = defaultdict(list)
    for call, indices in calls.items():
        if call.reason in FUSED and isinstance(call.fused, Streaming):
            found[call.reason].append((call.fused, indices))
    return found
