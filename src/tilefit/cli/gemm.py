"""``tilefit gemm``: one matrix product, explained."""

from __future__ import annotations

from math import isinf
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tilefit.cli import output
from tilefit.cli.calibration_option import CalibrationFile, Libraries
from tilefit.cli.completion import GpuName
from tilefit.cli.local_gpu import devices

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tilefit.cost.alternatives import Alternative, Interval
    from tilefit.cost.explain import GemmExplanation
    from tilefit.measure.choice import Choice

#: Neighbouring sizes shown.
_NEIGHBOURS = 6


def gemm(
    m: Annotated[int, typer.Argument(min=1, help="Rows of C.", show_default=False)],
    n: Annotated[int, typer.Argument(min=1, help="Columns of C.", show_default=False)],
    k: Annotated[int, typer.Argument(min=1, help="Contraction.", show_default=False)],
    gpu: GpuName = None,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="bf16, fp16, tf32, fp32, fp8, …")] = "bf16",
    layout: Annotated[
        Literal["TN", "NN", "NT", "TT"],
        typer.Option(help="BLAS letters (column-major); F.linear runs TN, its gradients NN and NT."),
    ] = "TN",
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Independent products.")] = 1,
    calibration: CalibrationFile = None,
    libraries: Libraries = "",
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Time the libraries' ways on this machine's GPU too: the best, and what the default loses.",
        ),
    ] = False,
) -> None:
    """Explain a product C[m,n] = A[m,k] @ B[k,n]: bound, tile, waves, kernels, better sizes and layouts."""
    from tilefit.cost import explain
    from tilefit.cost.alternatives import alternatives
    from tilefit.cost.priced import with_libraries
    from tilefit.ops import Gemm

    device, local = devices(gpu, measure, calibration)
    device = with_libraries(device, libraries)
    product = Gemm(m, n, k, dtype=dtype, layout=layout, batch=batch)
    console = output.stdout()
    console.print(_explained(explain(product, device)))
    console.print(_ways(alternatives(product, device)))
    if local:
        from tilefit.measure.choice import choose
        from tilefit.measure.run import pool_for

        with output.progress("Measuring"):
            choice = choose(product, pool_for(local.place), local.device)
        console.print(_chosen(choice, local.environment.gpu))


def _explained(told: GemmExplanation) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from tilefit import units
    from tilefit.report.text import because, times

    product, predicted = told.gemm, told.estimate
    title = Text.assemble(
        (f"gemm {product.shape} {product.layout} {product.dtype}", "bold"), f" on {told.gpu.title}"
    )
    intensity, balance = product.intensity, told.gpu.ops_per_byte(product.dtype)
    side = "above" if intensity >= balance else "below"
    facts = (
        ("Time", f"{units.seconds(predicted.time_s)} ({units.interval(predicted.low_s, predicted.high_s)})"),
        (
            "Rate",
            f"{units.rate(told.flop_per_s)}, {units.share(told.peak_share)} of the {product.dtype} peak",
        ),
        ("Bound", predicted.bound),
        ("Intensity", f"{intensity:.0f} FLOP/byte, {side} the GPU's {balance:.0f}"),
        ("Kernels", f"{predicted.kernel_family}: {because(predicted.kernel_family, told.kernel.reason)}"),
        ("Tile", _tile(told)),
        ("Waves", f"{told.waves:.2f}; the last one fills {units.share(told.last_wave_fill)} of the SMs"),
        ("Floor", f"{units.seconds(told.floor_s)}, the least that physics allows"),
        ("Times", times(predicted.provenance, told.gpu.calibration_title)),
    )
    operands = (
        (each.name, each.contiguous, str(each.leading_dimension), f"{each.alignment_bytes} bytes")
        for each in product.operands
    )
    parts: list[RenderableType] = [title, Text(), output.facts(facts), Text()]
    parts += [
        output.table("matrix", "contiguous", ">leading dimension", ">aligned to", rows=operands),
        Text(),
    ]
    if told.neighbours:
        better = (
            (
                f"{near.dimension} = {near.size}",
                units.seconds(near.estimate.time_s),
                f"{near.speedup:.2f}x",
                near.estimate.kernel_family,
            )
            for near in told.neighbours[:_NEIGHBOURS]
        )
        parts.append(Text("Larger sizes that take less time", style="bold"))
        parts.append(output.table("change", ">time", ">speedup", "kernels", rows=better))
    else:
        parts.append(Text("No larger size nearby takes less time.", style="green"))
    return Group(*parts)


def _ways(others: tuple[Alternative, ...]) -> RenderableType:
    """The other ways to run the product, and when their copies pay."""
    from rich.console import Group
    from rich.text import Text

    from tilefit import units

    if not others:
        return Text()
    rows = (
        (
            f"{other.what} ({other.gemm.layout})" if "transposed" in other.what else other.what,
            units.seconds(other.estimate.time_s),
            units.interval(other.saving_s.low, other.saving_s.high),
            " + ".join(f"{name} {units.seconds(time.time_s)}" for name, time in other.copies),
            _uses(other.uses),
        )
        for other in others
    )
    table = output.table("other ways", ">time", ">saves, 80 %", ">copies", "paid after", rows=rows)
    note = "Paid after so many products that use the copies; below 1, copying for each product pays too."
    return Group(Text(), table, Text(note, "dim"))


def _uses(uses: Interval) -> str:
    """``3.1 (2.0 to 7.5)``, ``never`` where nothing is saved."""

    def count(value: float) -> str:
        if isinf(value):
            return "never"
        return "<0.1" if value < 0.1 else f"{value:.1f}" if value < 10 else f"{value:,.0f}"

    if isinf(uses.low) or uses.high < 0.1:
        return count(uses.low)
    return f"{count(uses.value)} ({count(uses.low)} to {count(uses.high)})"


def _chosen(choice: Choice, gpu: str) -> RenderableType:
    """What each way took on this GPU, and what the default loses."""
    from rich.console import Group
    from rich.text import Text

    from tilefit import units
    from tilefit.measure.choice import DEFAULT

    table = output.table("way", ">time", ">spread", ">default / this", ">rate")
    default_s = choice.final[DEFAULT].median_s
    for name, timing in sorted(choice.final.items(), key=lambda pair: pair[1].median_s):
        table.add_row(
            name,
            units.seconds(timing.median_s),
            units.share(timing.spread),
            f"{default_s / timing.median_s:.2f}",
            units.rate(choice.gemm.flop / timing.median_s),
        )
    for name, rough_s in sorted(choice.rough_s.items(), key=lambda pair: pair[1]):
        if name not in choice.final:
            table.add_row(Text(name, "dim"), Text(units.seconds(rough_s), "dim"))
    for name, error in choice.errors.items():
        table.add_row(Text(name, "dim"), Text(error, "dim"))
    verdict = (
        f"PyTorch's default is as fast as anything tried ({choice.best}: within the noise)."
        if choice.is_noise or choice.best == DEFAULT
        else f"Regret of PyTorch's default: {choice.regret:.2f}x the time of {choice.best}."
    )
    title = Text.assemble(("Measured", "bold"), f" on {gpu}, operands cold in L2")
    return Group(Text(), title, table, Text(), Text(verdict))


def _tile(told: GemmExplanation) -> str:
    from tilefit.units import share

    tile = told.estimate.tile
    shape = f"{tile[0]}x{tile[1]}, " if tile else ""
    split = f", k split {told.plan.split} ways" if told.plan.split > 1 else ""
    wanted = f"{share(told.tile_efficiency)} of what they compute is wanted"
    return f"{shape}{told.plan.blocks:,} blocks{split}; {wanted}"
