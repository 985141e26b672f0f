"""BAT002: a batch beyond the memory; and what fits, for the other rules of the family."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from tilefit.cost.footprint import USABLE_SHARE, usable_bytes
from tilefit.cost.recompute import Recompute
from tilefit.cost.waits import host_bytes_per_s
from tilefit.gpus import Gpu
from tilefit.ops import Step
from tilefit.ops.memory import CHUNKS, OF_BF16, OF_EIGHT_BITS
from tilefit.ops.timeline import LOGITS
from tilefit.rules.base import Case, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import ERROR, UNSAFE
from tilefit.units import capacity, seconds, share, size

#: The share of the peak from which on a loss in parts is worth a word: a choice.
_LARGE = 0.05


def largest_batch(step: Step, gpu: Gpu) -> int:
    """Samples that fit; 0 if none does. Needs ``step.batch`` and ``step.memory``."""
    fits = step.largest_batch(usable_bytes(gpu))
    return step.batch if fits is None else fits


class OutOfMemory(Rule):
    """The step needs more memory than the GPU has.

    What it sees: the most bytes alive at once (parameters, gradients, optimizer state, saved activations,
    temporaries), against 94 % of the GPU's memory; the rest is taken by the CUDA context, library
    workspaces and fragmentation.

    Why it matters: the step would stop with an out-of-memory error.

    Arithmetic: parameters, gradients, optimizer state and what is made of them alone, such as autocast's
    copies of weights, do not depend on the batch; activations grow with it in proportion. The largest batch
    is what the rest of the memory holds, at the step's fullest moment on that batch.

    Example: with 10 GB fixed and 8 GB of activations for 4 samples, a GPU of 24 GB holds 6 samples.

    Fix: a smaller batch with gradient accumulation; activation checkpointing, which computes activations
    again instead of keeping them; where the fixed part alone is too large, sharding (FSDP), an 8-bit
    optimizer or a larger GPU. The message says which modules to checkpoint: those that cost the least time
    for each byte that they free at the fullest moment, until the step fits; ``tilefit.optimize`` does it.

    Source: Rajbhandari and others, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
    (2020), on what fills the memory.
    """

    code = "BAT002"
    title = "batch beyond the memory"
    wrong = Case(
        "nn.Sequential(*(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)) * 4)",
        "torch.empty(64, 1024, 4096)",
        "--amp bf16 --gpu l4",
    )
    right = wrong.but("(64,", "(16,")

    def check(self, context: Context) -> Proposals:
        step, gpu = context.step, context.gpu
        memory = step.memory
        usable = usable_bytes(gpu)
        if memory.peak_bytes <= usable:
            return
        training = step.settings.training
        parts = step.program.micro_batches
        fits = largest_batch(step, gpu) // parts if step.batch else 0
        if memory.constant_bytes > usable:
            gpus = ceil(memory.constant_bytes / usable)
            state = "parameters, gradients and optimizer state" if training else "the parameters"
            fix = f"No batch fits: shard {state} over at least {gpus} GPUs, or take a larger one."
        elif not fits:
            again = f", or {_recompute(context, usable)}" if training else ""
            fix = f"Not one sample fits: shorten the inputs, or take a larger GPU{again}."
        elif training:
            less = f"micro-batches of at most {fits}" if parts > 1 else f"a batch of at most {fits}"
            fix = f"Use {less} and accumulate gradients, or {_recompute(context, usable)}."
        else:
            fix = f"Use a batch of at most {fits}."
        yield Proposal(
            place=Place(),
            message=f"the step needs {size(memory.peak_bytes)}, {gpu.title} has {size(gpu.memory_bytes)}"
            + (f", {size(usable)} of it for tensors" if memory.peak_bytes <= gpu.memory_bytes else ""),
            fix=fix,
            safety=UNSAFE,
            change=None,
            arithmetic=(
                f"parameters {size(memory.parameter_bytes)}, gradients {size(memory.gradient_bytes)}, "
                f"optimizer {size(memory.optimizer_bytes)}, activations {size(memory.activation_bytes)}"
                + (f" for a batch of {step.batch}" if step.batch else ""),
                f"usable: {share(USABLE_SHARE)} of {size(gpu.memory_bytes)} = {size(usable)}",
                *(_choices(context) if training else ()),
            ),
            severity=ERROR,
        )


def _choices(context: Context) -> Iterator[str]:
    """What else takes less memory: bytes, price, and whether it is the same training."""
    memory = context.step.memory
    if state := memory.optimizer_bytes:
        # There and back for each step; where the update is computed is not counted.
        moved_s = 2 * state / host_bytes_per_s(context.gpu)
        for kind, left in (("bf16", OF_BF16), ("8 bits", OF_EIGHT_BITS)):
            yield f"optimizer state in {kind}: {size(state * (1 - left))} less; rounds the update (unsafe)"
        yield f"optimizer state on the host: {size(state)} less for {seconds(moved_s)} more (advice)"
    held = memory.timeline.peak().owners.get(LOGITS, 0)
    if held >= _LARGE * memory.peak_bytes:
        saved = size(held * (1 - 1 / CHUNKS))
        yield f"loss in {CHUNKS} chunks of rows: up to {saved} of logits less, the same loss (advice)"


def _recompute(context: Context, usable_bytes: float) -> str:
    """What checkpointing it takes to fit, priced; in general words where the timeline is not known."""
    memory = context.step.memory
    if not memory.timeline.events:
        return "checkpoint activations"
    found = Recompute(context.step, context.estimate.ops).within(usable_bytes)
    if not found.modules:
        return "checkpoint activations"
    if found.peak_bytes > usable_bytes:
        least = f"{capacity(found.peak_bytes)} at the least"
        return f"checkpoint activations and split the rest: all modules together leave {least}"
    modules = f"{len(found.modules)} module{'s' * (len(found.modules) > 1)}"
    saved = capacity(memory.peak_bytes - found.peak_bytes)
    return (
        f"checkpoint {modules} ({found.modules[0]} and on), which frees {saved} for "
        f'{seconds(found.extra_s)} more: tilefit.optimize(model, inputs, select=["checkpoint"])'
    )
