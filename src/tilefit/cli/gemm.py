"""``tilefit gemm``: one matrix product, explained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tilefit.cli import output

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tilefit.cost import GemmExplanation

#: Neighbouring sizes shown.
_NEIGHBOURS = 6


def gemm(
    m: Annotated[int, typer.Argument(min=1, help="Rows of C.", show_default=False)],
    n: Annotated[int, typer.Argument(min=1, help="Columns of C.", show_default=False)],
    k: Annotated[int, typer.Argument(min=1, help="Contraction.", show_default=False)],
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="GPU; default: the one in this machine.")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="bf16, fp16, tf32, fp32, fp8, …")] = "bf16",
    layout: Annotated[
        Literal["TN", "NN", "NT", "TT"],
        typer.Option(help="BLAS letters (column-major); F.linear runs TN, its gradients NN and NT."),
    ] = "TN",
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Independent products.")] = 1,
) -> None:
    """Explain a product C[m,n] = A[m,k] @ B[k,n]: bound, tile, waves, kernels, sizes worth moving to."""
    from tilefit.checker import resolve
    from tilefit.cost import explain
    from tilefit.ops import Gemm

    product = Gemm(m, n, k, dtype=dtype, layout=layout, batch=batch)
    output.stdout().print(_explained(explain(product, resolve(gpu)[0])))


def _explained(told: GemmExplanation) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from tilefit import units
    from tilefit.report.text import PROVENANCE

    product, predicted = told.gemm, told.estimate
    title = Text.assemble(
        (f"gemm {product.shape} {product.layout} {product.dtype}", "bold"), f" on {told.gpu.title}"
    )
    side = "above" if told.intensity >= told.ops_per_byte else "below"
    facts = output.table("", "")
    for label, value in (
        ("Time", f"{units.seconds(predicted.time_s)} ({units.interval(predicted.low_s, predicted.high_s)})"),
        (
            "Rate",
            f"{units.rate(told.flop_per_s)}, {units.share(told.peak_share)} of the {product.dtype} peak",
        ),
        ("Bound", predicted.bound),
        ("Intensity", f"{told.intensity:.0f} FLOP/byte, {side} the GPU's {told.ops_per_byte:.0f}"),
        ("Kernels", f"{told.kernel.family}: {told.kernel.reason}"),
        ("Tile", _tile(told)),
        ("Waves", f"{told.waves:.2f}; the last one fills {units.share(told.last_wave_fill)} of the SMs"),
        ("Floor", f"{units.seconds(told.floor_s)}, the least that physics allows"),
        ("Times", PROVENANCE[predicted.provenance]),
    ):
        facts.add_row(Text(label, style="dim"), Text(value))
    operands = output.table("matrix", "contiguous", ">leading dimension", ">aligned to")
    for operand in told.operands:
        operands.add_row(
            operand.name,
            operand.contiguous,
            str(operand.leading_dimension),
            f"{operand.alignment_bytes} bytes",
        )
    parts: list[RenderableType] = [title, Text(), facts, Text(), operands, Text()]
    if told.neighbours:
        better = output.table("change", ">time", ">speedup", "kernels")
        for near in told.neighbours[:_NEIGHBOURS]:
            better.add_row(
                f"{near.dimension} = {near.size}",
                units.seconds(near.estimate.time_s),
                f"{near.speedup:.2f}x",
                near.estimate.kernel_family,
            )
        parts += [Text("Larger sizes that take less time", style="bold"), better]
    else:
        parts.append(Text("No larger size nearby takes less time.", style="green"))
    return Group(*parts)


def _tile(told: GemmExplanation) -> str:
    from tilefit.units import share

    tile = told.estimate.tile
    shape = f"{tile[0]}x{tile[1]}, " if tile else ""
    split = f", k split {told.split} ways" if told.split > 1 else ""
    return (
        f"{shape}{told.tiles:,} blocks{split}; {share(told.tile_efficiency)} of what they compute is wanted"
    )
