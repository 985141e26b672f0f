"""PRC003: float64."""

from __future__ import annotations

from tilefit.rules.base import Case, Change, Context, Proposal, Proposals, Rule
from tilefit.rules.dtypes.autocast import in_types
from tilefit.rules.finding import UNSAFE
from tilefit.units import number, size


class Double(Rule):
    """Operations run in float64.

    What it sees: Operations whose operands are float64 or complex128; often a NumPy array or a Python
    constant that was turned into a tensor without a `dtype` and made everything after it double.

    Why it costs time: Twice the bytes of fp32, and products that run on fp64 units: half to one
    sixty-fourth of fp32's rate, and never on fp16/bf16 Tensor Cores.

    Arithmetic: An RTX 4090 has 82.6 TFLOP/s in fp32 and 1.29 in fp64; every streaming operation moves 8
    bytes per element, not 4.

    Example: `torch.from_numpy(array)` of a float64 array gives a float64 tensor:
    `torch.from_numpy(array).float()`, or `torch.tensor(values, dtype=torch.float32)`.

    Source: NVIDIA, "Ada GPU Architecture" whitepaper (fp64 at 1/64 of fp32).
    """

    code = "PRC003"
    title = "float64 on the GPU"
    wrong = Case(
        "nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).double()",
        "torch.empty(8192, 1024).double()",
        "--gpu l40s",
    )
    right = wrong.but(".double()", "")

    def check(self, context: Context) -> Proposals:
        step, gpu = context.step, context.gpu
        replaced = in_types(step, {"fp64": "fp32", "complex128": "complex64"})
        if not replaced:
            return
        entries = [step.ops[index] for index in replaced]
        ratio = gpu.peak_flop_per_s("fp32") / gpu.peak_flop_per_s("fp64")
        yield Proposal(
            place=context.place(replaced),
            message=f"{len(entries):,} operation{' runs' if len(entries) == 1 else 's run'} in float64",
            fix="Make the tensors float32 where they are created (dtype=torch.float32, or .float()).",
            safety=UNSAFE,
            change=Change(replaced),
            arithmetic=(
                f"{size(sum(e.op.moved_bytes for e in entries))} in 8-byte elements: half in fp32",
                f"this GPU's fp32 peak is {number(ratio)} times its fp64 peak",
            ),
        )
