"""ALN003: rows, where they are contiguous."""

from __future__ import annotations

from tilefit.ops import BACKWARD_WEIGHT, Gemm, StepOp
from tilefit.rules.alignment.padding import (
    arithmetic,
    best_padding,
    gemm_command,
    is_misaligned,
    misfit,
    run_on,
)
from tilefit.rules.base import Case, Change, Context, Proposal, Proposals, Rule
from tilefit.rules.finding import ADVICE
from tilefit.rules.resize import resize_streams, resized


class Rows(Rule):
    """The rows (batch x sequence) are a contiguous dimension, and not a multiple of 16 bytes.

    What it sees: products of a weight from the left, ``weight @ x`` with ``x[features, rows]``, as a
    convolution of size one written as a product or a layer that mixes positions does. There the rows are
    contiguous in the input, in the output and in both operands of the weight gradient.

    Why it costs time: as in ALN001. ``F.linear`` is free of it: its rows are contiguous nowhere, and an odd
    batch or sequence costs it nothing but a partly empty tile.

    Arithmetic: of ``a @ b``, 4096 x 4096 x 4096 in bf16 on an H200, the rows of ``a`` may be 4089 at no
    cost (202 µs), the columns of ``b`` cost 5.4 times (1049 µs).

    Example: ``torch.matmul(self.weight, x)`` with ``x`` of [batch, 512, 197]: pad 197 positions to 200, or
    write ``F.linear(x.transpose(1, 2), self.weight)``.

    Sources: NVIDIA, "Matrix Multiplication Background User's Guide"; measurements on an H200 with
    cuBLAS 13.
    """

    code = "ALN003"
    title = "contiguous rows not a multiple of 16 bytes"
    wrong = Case(
        "MixPositions()",
        "torch.empty(1536, 16383, requires_grad=True)",
        "--amp bf16",
        """
        class MixPositions(nn.Module):
            def __init__(self, positions=1536):
                super().__init__()
                self.weight = nn.Parameter(torch.empty(positions, positions))

            def forward(self, x):
                return self.weight @ x
        """,
    )
    right = wrong.but("16383", "16384")

    def check(self, context: Context) -> Proposals:
        groups: dict[tuple[int, str], list[tuple[int, str]]] = {}
        for index, entry in enumerate(context.step.ops):
            rows = contiguous_rows(entry)
            if rows and is_misaligned(size := getattr(entry.op, rows), entry.op.dtype):
                groups.setdefault((size, entry.op.dtype), []).append((index, rows))
        for (size, dtype), members in groups.items():
            yield self._proposal(context, size, dtype, members)

    def _proposal(self, context: Context, size: int, dtype: str, members: list[tuple[int, str]]) -> Proposal:
        step = context.step

        sizes, products = best_padding(
            context,
            [size],
            dtype,
            lambda to: {index: (resized(step.ops[index], to, rows),) for index, rows in members},
        )
        indices = [index for index, _ in members]
        return Proposal(
            place=context.place(indices),
            message=f"{size} rows are contiguous in memory and {misfit(dtype)}: {run_on(context, indices)}",
            fix=(
                f"Multiply from the other side, F.linear(x.transpose(-1, -2), weight), "
                f"or pad the {size} positions to {sizes[size]}."
            ),
            safety=ADVICE,
            change=Change({**resize_streams(step, sizes), **products}),
            arithmetic=arithmetic(context, products, indices),
            next_command=gemm_command(context, indices[0]),
        )


def contiguous_rows(entry: StepOp) -> str:
    """The dimension that counts rows if some operand has it contiguous; else empty."""
    op = entry.op
    if not isinstance(op, Gemm):
        return ""
    if entry.phase == BACKWARD_WEIGHT:
        return "k" if any(operand.contiguous == "k" for operand in op.operands) else ""
    return "n" if entry.is_weight_first(op.m, op.k, op.n) else ""
