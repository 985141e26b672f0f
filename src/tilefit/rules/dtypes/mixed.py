"""PRC002: no mixed precision."""

from __future__ import annotations

from collections import Counter

from tilefit.ops import Streaming
from tilefit.rules.base import Case, Change, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.dtypes.autocast import in_fp16, in_types, under_autocast
from tilefit.rules.finding import UNSAFE
from tilefit.units import number, share


class MixedPrecision(Rule):
    """The step multiplies in fp32 or TF32 on a GPU whose Tensor Cores are faster in half precision.

    What it sees: A step without autocast whose products are mostly fp32 or TF32, on a GPU with bf16 (or
    else fp16) Tensor Cores; bf16 autocast on a GPU whose Tensor Cores have fp16 alone (V100, T4, RTX 20).

    Why it costs time: Half precision doubles the Tensor Cores' rate over TF32 (and is 15 times fp32's on
    the CUDA cores), and activations between the products take half the bytes.

    Arithmetic: In inference the step is estimated again with all its tensors in half precision. In training
    it is estimated as autocast would run it: products in half precision; a cast
    of each weight once and of each fp32 activation that enters a product; normalisations, softmax, losses
    and reductions still in fp32; other operations in the type their operands have; weight gradients cast
    back to fp32; with fp16 the gradient scaler's pass. Amdahl's law bounds the gain: if products take the
    share s of the step, making them infinitely fast gives at most 1 / (1 - s), apart from the bytes saved
    elsewhere. That is why a small or memory-bound model gains little.

    Example: `with torch.autocast("cuda", dtype=torch.bfloat16): loss = model(x)`; for inference
    `model.to(torch.bfloat16)`.

    Source: Micikevicius et al., "Mixed Precision Training" (2018); PyTorch, "Automatic Mixed Precision",
    autocast's operation lists.
    """

    code = "PRC002"
    title = "no mixed precision"
    wrong = Case(
        "nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))", "torch.empty(8192, 1024)"
    )
    right = wrong.under("--amp bf16")

    def check(self, context: Context) -> Proposals:
        step, gpu, estimate = context.step, context.gpu, context.estimate
        half = next((dtype for dtype in ("bf16", "fp16") if gpu.supports(dtype)), None)
        if step.settings.amp == "bf16" and half == "fp16":
            yield from self._in_fp16(context)
            return
        products = [index for index, entry in enumerate(step.ops) if not isinstance(entry.op, Streaming)]
        wide = [index for index in products if step.ops[index].op.dtype in ("fp32", "tf32")]
        flop: Counter[str] = Counter()
        for index in wide:
            op = step.ops[index].op
            flop[op.dtype if gpu.supports(op.dtype) else "fp32"] += op.flop
        if step.settings.amp or half is None or 2 * flop.total() <= step.tensor_flop:
            return
        product_s = sum(estimate.ops[index].time_s for index in wide)
        total_s = sum(op.time_s for op in estimate.ops)
        part = product_s / total_s
        # Products alone make up the step: then nothing but their own speed bounds the gain.
        bound = f"at most {number(1 / (1 - part))} times as fast" if part < 1 else "as fast as one likes"
        dtype = max(flop, key=flop.__getitem__)
        ratio = gpu.peak_flop_per_s(half) / gpu.peak_flop_per_s(dtype)
        scaler = " and a torch.amp.GradScaler" if half == "fp16" and step.settings.training else ""
        name = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[half]
        run = f'under torch.autocast("cuda", dtype={name}){scaler}.'
        fix, change = f"Run forward and loss {run}", under_autocast(step, half)
        how = "priced with autocast's casts and with normalisation, softmax and loss left in fp32"
        if not step.settings.training:
            fix = f"Convert model and inputs once, .to({name}); or, with casts in every call, run it {run}"
            change = in_types(step, {"fp32": half, "tf32": half})
            how = f"priced with everything in {half}, converted once"
        yield Proposal(
            place=Place(),
            message=f"products run in {dtype}; in {half} this GPU's peak is {number(ratio)} times as high",
            fix=fix,
            safety=UNSAFE,
            change=Change(change),
            arithmetic=(
                f"products take {share(part)} of the GPU time: infinitely fast, they would make the step "
                f"{bound} (Amdahl), before bytes saved elsewhere",
                how,
            ),
        )

    def _in_fp16(self, context: Context) -> Proposals:
        step, gpu = context.step, context.gpu
        flop = sum(entry.op.flop for entry in step.ops if entry.op.multiplies and entry.op.dtype == "bf16")
        if 2 * flop <= step.tensor_flop:
            return
        scaler = " and a torch.amp.GradScaler" if step.settings.training else ""
        ratio = gpu.peak_flop_per_s("fp16") / gpu.peak_flop_per_s("bf16")
        yield Proposal(
            place=Place(),
            message=(
                "bf16 products run on this GPU's CUDA cores, as fp32 does: its Tensor Cores take fp16, whose "
                f"peak is {number(ratio)} times as high"
            ),
            fix=f'Use torch.autocast("cuda", dtype=torch.float16){scaler}.',
            safety=UNSAFE,
            change=Change(in_fp16(step)),
            arithmetic=("priced with fp16 in the place of bf16, which takes as many bytes",),
        )
