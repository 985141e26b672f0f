"""BAT001: a batch below the knee."""

from __future__ import annotations

from tilefit.cost import curve, step_s
from tilefit.ops import FORWARD, Gemm, Step
from tilefit.ops.scaling import scale_batch
from tilefit.rules.base import Case, Change, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.batch.memory import largest_batch
from tilefit.rules.finding import UNSAFE
from tilefit.units import number, seconds, size

#: The largest factor looked at.
_LARGEST_FACTOR = 64
#: Below this gain in throughput the batch is at the knee already.
_LEAST_GAIN = 0.15


class BatchBelowKnee(Rule):
    """A larger batch that fits the memory would process clearly more samples per second.

    What it sees: the throughput of the whole step predicted at twice the batch, four times, and so on, as
    far as the memory goes; the knee is the smallest that reaches 95 % of the best.

    Why it costs time: with few rows a matrix product reads all of its weights for little arithmetic and
    is bound by memory; the optimizer reads and writes every parameter whatever the batch; small kernels
    wait for the host's launches. All three cost the same for twice the samples.

    Arithmetic: a linear layer in 16 bits on b rows does about b FLOP per byte of its weights, and an H200
    needs 206 FLOP per byte to be busy, so that below some 200 rows its time hardly depends on b.

    Example: a step of 5.2 ms with 8 samples and 5.9 ms with 32: 32 samples take 3.5 times less time each.

    Fix: the batch named. It changes training: there are fewer updates for as many samples, which a larger
    learning rate makes up for as long as gradients of small batches differ much (McCandlish). A program that
    accumulates gradients takes larger micro-batches, and fewer of them, which changes nothing. A step that
    multiplies all samples with all (a contrastive loss) is passed over: its work grows with their square.

    Sources: NVIDIA, "Linear/Fully-Connected Layers User's Guide", batch size; McCandlish and others, "An
    Empirical Model of Large-Batch Training" (2018), on how far a batch may grow.
    """

    code = "BAT001"
    title = "batch below the knee of the throughput curve"
    wrong = Case(
        "nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8)))", "torch.empty(16, 4096)", "--amp bf16"
    )
    right = wrong.but("(16,", "(65536,")

    def check(self, context: Context) -> Proposals:
        step = context.step
        if not step.batch or not context.estimate.time_s or _pairs_samples(step):
            return
        known = step.memory.peak_bytes > 0
        most = largest_batch(step, context.gpu) if known else _LARGEST_FACTOR * step.batch
        rates = {1: step.batch / context.estimate.time_s}
        scaled = {}
        factor = 2
        while factor <= _LARGEST_FACTOR and factor * step.batch <= most:
            scaled[factor] = scale_batch(step, factor)
            rates[factor] = factor * step.batch / step_s(scaled[factor], context.gpu)
            # Past the knee nothing more is to be learnt.
            if rates[factor] < 1.02 * rates[factor // 2]:
                break
            factor *= 2
        knee = curve.knee(rates)
        if rates[knee] < (1 + _LEAST_GAIN) * rates[1]:
            return
        needed = scaled[knee].memory.peak_bytes
        end = f"more than {_LARGEST_FACTOR} times the batch was not looked at; " * (factor > _LARGEST_FACTOR)
        yield Proposal(
            place=Place(),
            message=(
                f"a batch of {step.batch} does not fill the GPU: with {knee * step.batch} it would do "
                f"{number(rates[knee] / rates[1])} times as many samples per second"
            ),
            fix=_fix(step, knee),
            safety=UNSAFE,
            change=Change({i: (entry,) for i, entry in enumerate(scaled[knee].ops)}, knee, scaled[knee]),
            arithmetic=(
                *(
                    f"batch {factor * step.batch}: {number(rate)} samples/s, "
                    f"{seconds(factor * step.batch / rate)} a step"
                    for factor, rate in rates.items()
                ),
                f"{end}memory at {knee * step.batch}: {size(needed)} of {size(context.gpu.memory_bytes)}"
                if known
                else f"{end}memory was not captured: check that the larger batch fits",
            ),
        )


def _pairs_samples(step: Step) -> bool:
    """Whether all samples are multiplied with all, as a contrastive loss does: its work is no multiple of the
    batch's."""
    products = (op for _, entry, op in step.each(Gemm) if not entry.parameter and entry.phase == FORWARD)
    return any(op.batch == 1 < step.batch == op.m == op.n for op in products)


def _fix(step: Step, factor: int) -> str:
    whole, parts = factor * step.batch, step.program.micro_batches
    if not step.settings.training:
        return f"Put {whole} samples into one call."
    if parts % factor:
        of = f"micro-batches of {whole // parts}" if parts > 1 else f"a batch of {whole}"
        return f"Use {of} (fewer updates for as many samples: adapt the learning rate)."
    old, new = f"{parts} micro-batches of {step.batch // parts}", f"micro-batches of {whole // parts}"
    fewer = (
        f"Accumulate {parts // factor} {new}" if parts > factor else f"Take all {step.batch} samples at once"
    )
    return f"{fewer}, in place of {old}."
