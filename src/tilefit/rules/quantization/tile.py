"""QNT001: partly empty tiles."""

from __future__ import annotations

from collections.abc import Sequence

from tilefit.cost import MATH, estimate
from tilefit.cost.tiles import tile_efficiency
from tilefit.ops import Gemm
from tilefit.ops.dtypes import TENSOR_CORE_DTYPES, size_bytes
from tilefit.rules.alignment.padding import gemm_command, is_misaligned
from tilefit.rules.base import Case, Change, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import ADVICE
from tilefit.rules.layers import Linear, gemm, inner_sizes, linears
from tilefit.rules.resize import resize_features, resize_streams
from tilefit.units import seconds, share

#: The most of a size that advice may take away.
_LARGEST_CUT = 0.06
#: Time that must be saved beyond the work taken away, as a share of the products' time.
_BEYOND_CUT = 0.05


class TileQuantization(Rule):
    """A feature size is a little larger than a whole number of tiles.

    What it sees: math-bound products of linear layers whose output is cut into tiles of which the last
    row or column is nearly empty, where a feature size a few per cent smaller saves clearly more time than
    it takes away work.

    Why it costs time: a product is computed in tiles of its output, 256 x 128 elements and smaller, and a
    tile that sticks out of the matrix costs as much as a full one.

    Arithmetic: with tiles of 128 x 128, an output of 256 x 256 takes 4 tiles; 257 x 256 takes 6, half as
    much time again for 0.4 % more work. The library also has smaller, less efficient tiles, so that the
    real loss is smaller: the rule prices it with the best tile on either side.

    Example: 1032 outputs over 1024 rows: 1024 outputs save a column of tiles.

    Fix: use the smaller size. It changes the model a little, so decide it before training.

    Source: NVIDIA, "Matrix Multiplication Background User's Guide", tile quantization.
    """

    code = "QNT001"
    title = "feature size just above a whole number of tiles"
    wrong = Case(
        "nn.Sequential(*(nn.Linear(4096, 1032, bias=False), nn.Linear(1032, 4096, bias=False)) * 4)",
        "torch.empty(3456, 4096)",
        "--amp bf16 --gpu a100-sxm-80gb",
    )
    right = wrong.but("1032", "1024")

    def check(self, context: Context) -> Proposals:
        layers = linears(context.step)
        for (size, dtype), members in inner_sizes(layers).items():
            if dtype not in TENSOR_CORE_DTYPES or is_misaligned(size, dtype):
                continue
            products = sorted(index for layer in members for index in layer.indices)
            bound = [index for index in products if context.estimate.ops[index].bound == MATH]
            before_s = context.time_s(products)
            if 2 * context.time_s(bound) < before_s:
                continue
            proposal = self._proposal(context, members, size, dtype, products, before_s)
            if proposal:
                yield proposal

    def _proposal(
        self,
        context: Context,
        members: Sequence[Linear],
        size: int,
        dtype: str,
        products: list[int],
        before_s: float,
    ) -> Proposal | None:
        step = context.step
        options = {
            smaller: resize_features(step, members, {size: smaller})
            for multiple in (128 // size_bytes(dtype), 128, 256)
            if 0 < (smaller := size // multiple * multiple) < size and smaller >= (1 - _LARGEST_CUT) * size
        }
        if not options:
            return None
        # The best is the one that saves most beyond the work it takes away.
        beyond = {
            smaller: 1 - context.replaced_s(change) / before_s - (1 - smaller / size)
            for smaller, change in options.items()
        }
        new = max(options, key=lambda smaller: beyond[smaller])
        if beyond[new] < _BEYOND_CUT:
            return None
        worst = min(products, key=lambda index: _filled(context, index))
        op, change = gemm(step, worst), options[new]
        after = change[worst][0].op
        assert isinstance(after, Gemm)
        old_estimate, new_estimate = context.estimate.ops[worst], estimate(after, context.gpu)
        return Proposal(
            place=Place.of(members, sites=len(members)),
            message=f"{size} features leave tiles partly empty; {new} would not",
            fix=f"Use {new} features instead of {size} ({share(1 - new / size)} fewer).",
            safety=ADVICE,
            change=Change({**resize_streams(step, {size: new}), **change}),
            arithmetic=(
                f"{step.ops[worst].phase} {op.layout} {op.shape}: tile {_tile(old_estimate.tile)}, "
                f"{share(_filled(context, worst))} of the tiles' area wanted, {seconds(old_estimate.time_s)}",
                f"{after.layout} {after.shape}: tile {_tile(new_estimate.tile)}, "
                f"{seconds(new_estimate.time_s)}",
            ),
            next_command=gemm_command(context, worst),
        )


def _filled(context: Context, index: int) -> float:
    op, tile = gemm(context.step, index), context.estimate.ops[index].tile
    return tile_efficiency(op.m, op.n, tile) if tile else 1.0


def _tile(tile: tuple[int, int] | None) -> str:
    return f"{tile[0]}x{tile[1]}" if tile else "unknown"
