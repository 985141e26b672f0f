"""QNT002: a nearly empty last wave."""

from __future__ import annotations

from collections import Counter
from math import ceil

from tilefit.cost import MATH, estimate
from tilefit.ops import Gemm, Step
from tilefit.ops.dtypes import TENSOR_CORE_DTYPES
from tilefit.ops.scaling import scale_batch
from tilefit.rules.alignment.padding import gemm_command
from tilefit.rules.base import Case, Change, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import UNSAFE
from tilefit.rules.layers import gemm, linears
from tilefit.units import share

#: Idle slots of last waves must cost this share of the step before the rule looks for another batch.
_LEAST_IDLE = 0.03
#: The products must run this much faster per sample on the other batch.
_LEAST_GAIN = 0.05


class WaveTail(Rule):
    """The batch leaves the last wave of tiles nearly empty.

    What it sees: math-bound products of linear layers whose tiles need a few more slots than a whole
    number of rounds over the GPU's multiprocessors offers, and a slightly smaller batch on which they run
    at least 5 % faster per sample.

    Why it costs time: tiles run in waves, one per multiprocessor at a time; a last wave with few tiles
    takes as long as a full one.

    Arithmetic: an A100 has 108 multiprocessors. 2304 x 1536 outputs in 256 x 128 tiles are 9 x 12 = 108
    tiles, one full wave; 1537 columns make 117 tiles and two waves, 54 % of the slots used. On an H200 with
    132 multiprocessors both fit in one wave, so the advice depends on the GPU.

    Example: 17 samples of 1024 tokens -> 16.

    Fix: use the batch named. Another batch can change training, so scale the learning rate with care.

    Source: NVIDIA, "Matrix Multiplication Background User's Guide", wave quantization.
    """

    code = "QNT002"
    title = "batch just above a whole number of waves"
    wrong = Case(
        "nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))",
        "torch.empty(21, 512, 2048)",
        "--amp bf16 --gpu a100-sxm-80gb",
    )
    right = wrong.but("(21,", "(20,")

    def check(self, context: Context) -> Proposals:
        step, batch = context.step, context.step.batch
        if batch < 2:
            return
        products: Counter[int] = Counter()
        first: dict[tuple[Gemm, str], int] = {}
        idle_s = 0.0
        for layer in linears(step):
            for index in layer.indices:
                predicted, op = context.estimate.ops[index], gemm(step, index)
                if predicted.bound == MATH and predicted.waves and op.dtype in TENSOR_CORE_DTYPES:
                    products[first.setdefault((op, step.ops[index].phase), index)] += 1
                    idle_s += predicted.time_s * (1 - predicted.waves / ceil(predicted.waves))
        if not products or idle_s < _LEAST_IDLE * context.estimate.time_s:
            return
        # Only smaller ones: a larger batch is better for other reasons too, and BAT001's matter.
        near = max(1, batch // 16)
        smaller = range(max(1, batch - 4 * near), batch + 1, near)
        per_sample_s = {other: self._per_sample_s(context, products, other) for other in (*smaller, batch)}
        best = min(per_sample_s, key=lambda other: per_sample_s[other])
        gain = 1 - per_sample_s[best] / per_sample_s[batch]
        if gain < _LEAST_GAIN:
            return
        scaled = scale_batch(step, best / batch)
        worst = max(products, key=lambda index: products[index] * context.estimate.ops[index].time_s)
        waves = context.estimate.ops[worst].waves
        assert waves is not None
        yield Proposal(
            place=Place.of(
                (step.ops[index].site for index in products), step.ops[worst].site.source, len(products)
            ),
            message=(
                f"a batch of {batch} starts waves that stay partly empty on {context.gpu.sms} "
                f"multiprocessors; {best} does not"
            ),
            fix=f"Use a batch of {best} instead of {batch}.",
            safety=UNSAFE,
            change=Change({i: (entry,) for i, entry in enumerate(scaled.ops)}, work_ratio=best / batch),
            arithmetic=(
                f"{step.ops[worst].op.shape}: {waves:.2f} waves, "
                f"{share(waves / ceil(waves))} of the slots used",
                f"linear layers: {share(gain)} faster per sample",
            ),
            next_command=gemm_command(context, worst),
        )

    def _per_sample_s(self, context: Context, products: Counter[int], batch: int) -> float:
        few = Step(ops=tuple(context.step.ops[index] for index in products))
        scaled = scale_batch(few, batch / context.step.batch)
        times = (estimate(entry.op, context.gpu).time_s for entry in scaled.ops)
        return sum(t * n for t, n in zip(times, products.values(), strict=True)) / batch
