"""INT001: linear layers limited by reading their weights."""

from __future__ import annotations

from tilefit.cost import MEMORY
from tilefit.ops.scaling import scale_batch
from tilefit.rules.base import Case, Change, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.batch.memory import largest_batch
from tilefit.rules.finding import ADVICE
from tilefit.rules.flow import LinearCall, linear_calls
from tilefit.rules.layers import gemm
from tilefit.units import counted, number, share

#: Such layers matter from this share of the GPU time on.
_LEAST_SHARE = 0.2
#: Other operations are repeated this often in the changed step.
_LARGEST_FACTOR = 8


class SmallBatch(Rule):
    """Linear layers with few rows spend their time reading weights.

    What it sees: Linear layers that are bound by memory, whose weights are most of what they move, and
    that together take at least a fifth of the GPU time: decoding one token at a time, serving single
    requests. A layer that is bound by memory because it is narrow, whatever the rows, is not counted.

    Why it costs time: A product with m rows uses every weight m times. Below the GPU's ratio of
    arithmetic to bandwidth the Tensor Cores wait for the weights, and twice the rows take the same time.

    Arithmetic: In 2-byte types the intensity `m n k / (m k + k n + m n)` is about m where m is much
    smaller than n and k. An A100 needs 153 FLOP per byte, an H200 206. A linear layer of 1024 inputs and
    4096 outputs has an intensity of 315 at 512 rows and of 1 at one row.

    Example: Serve requests in batches; let the decoder generate for several sequences at once; put the
    micro-batches of gradient accumulation together.

    Source: NVIDIA, "GPU Performance Background User's Guide", arithmetic intensity, with this example.
    """

    code = "INT001"
    title = "linear layers limited by reading their weights"
    wrong = Case(
        "nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(8))).bfloat16()",
        "torch.empty(1, 8192, dtype=torch.bfloat16)",
        "--infer",
    )
    right = wrong.but("(1,", "(512,")

    def check(self, context: Context) -> Proposals:
        step, gpu, estimate = context.step, context.gpu, context.estimate
        bound = [
            call
            for call in linear_calls(step)
            if estimate.ops[call.forward].bound == MEMORY and _reads_weights(context, call)
        ]
        time_s = sum(estimate.ops[call.forward].time_s for call in bound)
        if not step.batch or not bound or time_s < _LEAST_SHARE * estimate.gpu_time_s:
            return
        longest = max(bound, key=lambda call: estimate.ops[call.forward].time_s)
        op = gemm(step, longest.forward)
        needed = gpu.ops_per_byte(op.dtype)
        fits = largest_batch(step, gpu) if step.memory.peak_bytes else _LARGEST_FACTOR * step.batch
        factor = 1
        while factor * op.m < needed and 2 * factor <= min(_LARGEST_FACTOR, fits // step.batch):
            factor *= 2
        if factor == 1:
            return
        scaled = scale_batch(step, factor)
        layers = {call.forward for call in bound}
        place = Place.of((call.layer for call in bound), longest.layer.source)
        yield Proposal(
            place=place,
            message=f"{share(time_s / estimate.gpu_time_s)} of the GPU time goes to "
            f"{counted(place.sites, 'linear layer')} on {counted(op.m, 'row')}, most of it to read weights",
            fix=f"Process {factor * step.batch} samples at once instead of {step.batch}: "
            f"{factor * op.m} rows use each weight {factor} times as often.",
            safety=ADVICE,
            change=Change(
                # The same work in everything but these layers: what they gain, and nothing else.
                {
                    i: (scaled.ops[i],) if i in layers else (entry,) * factor
                    for i, entry in enumerate(step.ops)
                },
                work_ratio=factor,
            ),
            arithmetic=(
                f"{longest.layer.module} {op.shape}: {number(op.intensity)} FLOP per byte; "
                f"this GPU needs {number(needed)} in {op.dtype}",
            ),
        )


def _reads_weights(context: Context, call: LinearCall) -> bool:
    op = gemm(context.step, call.forward)
    return op.k * op.n > op.m * (op.k + op.n) and op.intensity < context.gpu.ops_per_byte(op.dtype)
