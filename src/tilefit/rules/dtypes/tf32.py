"""PRC001: fp32 products without TF32."""

from __future__ import annotations

from dataclasses import replace

from tilefit import units
from tilefit.ops import Conv, Gemm, Recurrent
from tilefit.rules.base import Case, Change, Context, Edits, Proposal, Proposals, Rule
from tilefit.rules.finding import UNSAFE


class Tf32(Rule):
    """fp32 products run on the CUDA cores although the GPU has TF32 Tensor Cores.

    What it sees: Matrix products, convolutions and recurrent layers in fp32, in a step without mixed
    precision, on a GPU of the Ampere generation or later. (fp32 products inside a mixed-precision step are
    PRC004's.)

    Why it costs time: PyTorch multiplies fp32 matrices in full fp32 unless told otherwise, which leaves
    the Tensor Cores idle. TF32 keeps fp32's storage and range and rounds the factors to 10 bits of mantissa.

    Arithmetic: An A100 has 19.5 TFLOP/s in fp32 and 156 in TF32, an H100 67 and 495. The rounding of a
    factor is at most 2^-11, 4.9e-4 of its value; sums are still kept in fp32.

    Example: `torch.set_float32_matmul_precision("high")` before training;
    `torch.backends.cudnn.allow_tf32 = True` for convolutions (PyTorch's default).

    Source: NVIDIA, "A100 Tensor Core GPU Architecture" (TF32); PyTorch, "CUDA semantics", TF32 section.
    """

    code = "PRC001"
    title = "fp32 matrix products without TF32"
    wrong = Case(
        "nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))", "torch.empty(8192, 1024)"
    )
    right = wrong.under("--tf32")

    def check(self, context: Context) -> Proposals:
        step, gpu = context.step, context.gpu
        if step.settings.amp or not gpu.supports("tf32"):
            return
        replaced: Edits = {}
        for index, entry in enumerate(step.ops):
            op = entry.op
            if isinstance(op, Gemm | Conv | Recurrent) and op.dtype == "fp32":
                replaced[index] = (replace(entry, op=replace(op, dtype="tf32")),)
        if not replaced:
            return
        products = [step.ops[index] for index in replaced]
        ratio = gpu.peak_flop_per_s("tf32") / gpu.peak_flop_per_s("fp32")
        flop = sum(entry.op.flop for entry in products)
        yield Proposal(
            place=context.place(replaced),
            message=f"{len(products):,} product{'s run' if len(products) > 1 else ' runs'} in fp32 on CUDA "
            "cores, not in TF32 on Tensor Cores",
            fix='Call torch.set_float32_matmul_precision("high"), and leave '
            "torch.backends.cudnn.allow_tf32 on.",
            safety=UNSAFE,
            change=Change(replaced),
            arithmetic=(
                f"{units.flop(flop)} of {units.flop(step.flop)} are in fp32; "
                f"TF32's peak on this GPU is {units.number(ratio)} times fp32's",
                "factors are rounded to 10 bits of mantissa: at most 4.9e-4 of their value",
            ),
        )
