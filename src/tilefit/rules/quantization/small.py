"""QNT003: a small dimension with few powers of two."""

from __future__ import annotations

from math import gcd

from tilefit.cost import MATH
from tilefit.ops.dtypes import LINE_BYTES, TENSOR_CORE_DTYPES, size_bytes
from tilefit.rules.alignment.padding import arithmetic, gemm_command, is_misaligned
from tilefit.rules.base import Case, Change, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import ADVICE
from tilefit.rules.layers import inner_sizes, linears
from tilefit.rules.resize import pad, resize_features, resize_streams

#: Beyond it, one partly empty tile no longer matters.
_SMALL = 256


class SmallDimension(Rule):
    """A small feature size is divisible by few powers of two, and a larger one would be faster.

    What it sees: math-bound products of linear layers with a feature size of at most 256 that is aligned
    to 16 bytes but not to a full memory line (64 elements in fp16 and bf16), where the next multiple of a
    line takes less time in spite of its added work.

    Why it costs time: with one or two tiles along a dimension, a partly empty one is a large share; the
    contraction, too, is cut into pieces of a memory line.

    Arithmetic: 72 outputs take the two 64-wide tiles that 128 outputs take, or one of 128 that is 56 %
    full.

    Example: 200 = 8 x 25 features -> 256.

    Fix: use the larger size; the added features are free capacity.

    Source: NVIDIA, "Matrix Multiplication Background User's Guide", on dimension sizes and tiles.
    """

    code = "QNT003"
    title = "small dimension with few powers of two"
    wrong = Case(
        "nn.Sequential(*(nn.Linear(8192, 72, bias=False), nn.Linear(72, 8192, bias=False)) * 4)",
        "torch.empty(65536, 8192)",
        "--amp bf16",
    )
    right = wrong.but("72", "128")

    def check(self, context: Context) -> Proposals:
        step = context.step
        for (size, dtype), members in inner_sizes(linears(step)).items():
            line = LINE_BYTES // size_bytes(dtype)
            if (
                dtype not in TENSOR_CORE_DTYPES
                or size > _SMALL
                or is_misaligned(size, dtype)
                or gcd(size, line) == line
            ):
                continue
            products = sorted(index for layer in members for index in layer.indices)
            if not any(context.estimate.ops[index].bound == MATH for index in products):
                continue
            options = {
                new: resize_features(step, members, {size: new})
                for new in {pad(size, line), 1 << (size - 1).bit_length()}
            }
            new = min(options, key=lambda n: context.replaced_s(options[n]))
            yield Proposal(
                place=Place.of(members, sites=len(members)),
                message=(
                    f"{size} = {size & -size} x {size // (size & -size)} features fill their tiles badly; "
                    f"{new} would be faster"
                ),
                fix=f"Use {new} features instead of {size}.",
                safety=ADVICE,
                change=Change({**resize_streams(step, {size: new}), **options[new]}),
                arithmetic=arithmetic(context, options[new], products),
                next_command=gemm_command(context, products[0]),
            )
