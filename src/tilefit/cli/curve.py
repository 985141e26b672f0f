"""``tilefit curve``: time and rate while one size varies, with the knee, the dips and where to move."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from tilefit.cli import output
from tilefit.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from tilefit.cost.curve import Curve
    from tilefit.ops import Gemm
    from tilefit.report.plot import Line

Format = Literal["text", "json", "svg"]

app = typer.Typer(
    name="curve",
    help="Plot predicted time and rate while one size varies: the knee, the dips, the next efficient size. "
    "That size is written FIRST:LAST, or FIRST:LAST:STEP for FIRST and the multiples of STEP up to LAST.",
    no_args_is_help=True,
)

#: Rows of the table of sizes, and of the dips and steps of each curve.
_ROWS = 8
_DIPS = 8
_STEPS = 8
_WIDEST = 100

GpuName = Annotated[str | None, typer.Option(metavar="NAME", help="GPU; default: the one in this machine.")]
Dtype = Annotated[str, typer.Option(metavar="TYPE", help="bf16, fp16, tf32, fp32, fp8, …")]
OutputFormat = Annotated[
    Format | None,
    typer.Option(metavar="FORMAT", help="text, json or svg; default: by the ending of the file, else text."),
]
OutputFile = Annotated[
    Path | None,
    typer.Option("--output-file", "--output", metavar="FILE", help="Write there instead of to stdout."),
]
_OVER = "Size that varies, where none is a range: from 1 to the one given."


@app.command()
def gemm(
    m: Annotated[str, typer.Argument(help="Rows of C, or a range.", show_default=False)],
    n: Annotated[str, typer.Argument(help="Columns of C, or a range.", show_default=False)],
    k: Annotated[str, typer.Argument(help="Contraction, or a range.", show_default=False)],
    over: Annotated[Literal["m", "n", "k", "batch"] | None, typer.Option(help=_OVER)] = None,
    gpu: GpuName = None,
    dtype: Dtype = "bf16",
    layout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LETTERS",
            help="BLAS letters (column-major), TN by default; F.linear runs TN, its gradients NN and NT. "
            "Repeat to compare.",
        ),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="N", help="Independent products, or a range.")] = "1",
    output_format: OutputFormat = None,
    output_file: OutputFile = None,
) -> None:
    """A product C[m,n] = A[m,k] @ B[k,n]: tilefit curve gemm 1:512 4096 4096 --gpu h200."""
    from tilefit.checker import resolve
    from tilefit.cost.curve import curve
    from tilefit.ops import Gemm

    (device,) = resolve(gpu)
    sweep = _sweep({"m": m, "n": n, "k": k, "batch": batch}, over)

    def products(letters: str) -> Callable[[int], tuple[Gemm]]:
        return lambda size: (Gemm(**sweep.at(size), dtype=dtype, layout=letters),)  # type: ignore[arg-type]

    curves = [
        curve(letters, products(letters), sweep.sizes, device) for letters in dict.fromkeys(layout or ["TN"])
    ]
    _write(f"gemm {sweep.text(('m', 'n', 'k', 'batch'))} {dtype}", sweep, curves, output_format, output_file)


@app.command()
def linear(
    in_features: Annotated[
        str, typer.Option("--in", "--hidden", metavar="N", help="Input features, or a range.")
    ],
    out_features: Annotated[
        str, typer.Option("--out", "--vocab", metavar="N", help="Output features, or a range.")
    ],
    batch: Annotated[str, typer.Option("--batch", "--rows", metavar="N", help="Samples, or a range.")] = "1",
    seq: Annotated[str, typer.Option(metavar="N", help="Tokens per sample, or a range.")] = "1",
    over: Annotated[
        Literal["batch", "rows", "seq", "in", "hidden", "out", "vocab"] | None, typer.Option(help=_OVER)
    ] = None,
    train: Annotated[
        bool, typer.Option("--train/--infer", help="With both gradients, or forward alone.")
    ] = True,
    gpu: GpuName = None,
    dtype: Dtype = "bf16",
    output_format: OutputFormat = None,
    output_file: OutputFile = None,
) -> None:
    """A linear layer: tilefit curve linear --rows 16384 --in 768 --out 50200:50400 --gpu h200."""
    from tilefit.checker import resolve
    from tilefit.cost import curve

    (device,) = resolve(gpu)
    over = {"rows": "batch", "hidden": "in", "vocab": "out"}.get(over or "", over)  # type: ignore[assignment]
    sweep = _sweep({"in": in_features, "out": out_features, "batch": batch, "seq": seq}, over)

    def products(size: int) -> tuple[Gemm, ...]:
        at = sweep.at(size)
        return curve.linear(at["batch"] * at["seq"], at["in"], at["out"], dtype, train=train)

    name = "layer" if train else "forward"
    curves = [curve.curve(name, products, sweep.sizes, device)]
    _write(
        f"linear {sweep.text(('in', 'out', 'batch', 'seq'))} {dtype}",
        sweep,
        curves,
        output_format,
        output_file,
    )


class _Sweep(NamedTuple):
    """Which size varies, through what, and the others."""

    over: str
    sizes: tuple[int, ...]
    fixed: Mapping[str, int]

    def at(self, size: int) -> dict[str, int]:
        """All sizes, by name."""
        return {**self.fixed, self.over: size}

    def text(self, names: Sequence[str]) -> str:
        """``m=1:512 n=4096 k=4096``."""
        values = {name: str(size) for name, size in self.fixed.items()}
        values[self.over] = f"{self.sizes[0]}:{self.sizes[-1]}"
        return " ".join(f"{name}={values[name]}" for name in names)


def _sweep(given: Mapping[str, str], over: str | None) -> _Sweep:
    """Reads sizes, of which one varies.

    Raises:
        UsageError: a size is no size or range, or not exactly one varies.
    """
    from tilefit.cost.curve import sizes_between

    read = {name: _range(name, text) for name, text in given.items()}
    varying = {name for name, numbers in read.items() if len(numbers) > 1} or {over} - {None}
    if len(varying) != 1:
        raise UsageError(
            f"several sizes are ranges: {', '.join(sorted(filter(None, varying)))}"
            if varying
            else "no size varies",
            hint="Write the one that varies as FIRST:LAST, the others as numbers, such as 1:512 4096 4096.",
        )
    (name,) = varying
    if over not in (None, name):
        raise UsageError(f"{name} is a range, but --over says {over}", hint=f"Leave out --over {over}.")
    assert name is not None
    numbers = read[name] if len(read[name]) > 1 else (1, *read[name])
    fixed = {other: values[0] for other, values in read.items() if other != name}
    return _Sweep(name, sizes_between(*numbers), fixed)


def _range(name: str, text: str) -> tuple[int, ...]:
    """``512`` as (512,), ``1:512:8`` as (1, 512, 8)."""
    parts = text.split(":")
    numbers = tuple(int(part) for part in parts if part.isascii() and part.isdigit())
    if len(numbers) < len(parts) or len(parts) > 3 or not all(numbers):
        raise UsageError(
            f"{text!r} is neither a size nor a range",
            where=name,
            hint="Write a number from 1 on, FIRST:LAST or FIRST:LAST:STEP, such as 50257 or 50200:50400:8.",
        )
    return numbers


def _write(
    title: str, sweep: _Sweep, curves: list[Curve], output_format: Format | None, file: Path | None
) -> None:
    if output_format is None:
        ending = file.suffix.removeprefix(".") if file else ""
        output_format = ending if ending in ("json", "svg") else "text"  # type: ignore[assignment]
    console = output.stdout()
    if output_format == "text":
        text = _text(title, sweep, curves, min(console.width, _WIDEST))
        if file is None:
            console.print(text)
            return
        with console.capture() as captured:
            console.print(text)
        written = captured.get()
    elif output_format == "json":
        written = _json(title, sweep, curves)
    else:
        from tilefit.report.plot import svg

        heading = f"{title} on {curves[0].gpu.title}"
        written = svg(
            [_line(each) for each in curves], heading, sweep.over, f"TFLOP/s, {curves[0].provenance}"
        )
    if file is None:
        print(written, end="")
    else:
        output.write_file(file, written)


def _line(curve: Curve) -> Line:
    from tilefit.report.plot import Line

    return Line(
        curve.name,
        tuple((point.size, point.flop_per_s / 1e12) for point in curve.points),
        frozenset(point.size for dip in curve.dips for point in dip.points),
        curve.knee.size if curve.knee else None,
    )


def _json(title: str, sweep: _Sweep, curves: list[Curve]) -> str:
    data = {
        "schema_version": 1,
        "gpu": curves[0].gpu.name,
        "title": title,
        "over": sweep.over,
        "fixed": dict(sweep.fixed),
        "provenance": curves[0].provenance,
        "curves": [
            {
                "name": each.name,
                "knee": each.knee.size if each.knee else None,
                "best": each.best.size,
                "steps": [point.size for point in each.steps],
                "points": [asdict(point) | {"flop_per_s": point.flop_per_s} for point in each.points],
                "dips": [
                    {
                        "sizes": [point.size for point in dip.points],
                        "next": dip.better.size,
                        "time_s": dip.worst.time_s,
                        "next_time_s": dip.better.time_s,
                        "speedup": dip.speedup,
                    }
                    for dip in each.dips
                ],
            }
            for each in curves
        ],
    }
    return json.dumps(data, indent=2) + "\n"


def _text(title: str, sweep: _Sweep, curves: list[Curve], width: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from tilefit.report.plot import braille, ceiling
    from tilefit.report.text import PROVENANCE

    heading = Text.assemble((title, "bold"), f" on {curves[0].gpu.title}")
    parts: list[RenderableType] = [heading]
    top = ceiling(max(each.best.flop_per_s for each in curves) / 1e12)
    styles = {"▾": "yellow", "▲": "green"}
    for each in curves:
        parts += [Text(), Text.assemble((each.name, "bold"), f", TFLOP/s over {sweep.over}")]
        for row in braille(_line(each), width, 10 if len(curves) == 1 else 6, top):
            style = next((style for sign, style in styles.items() if sign in row), "")
            parts.append(Text(row, style, no_wrap=True))
    parts += [Text(), _sizes(sweep.over, curves), Text(), _knees(sweep.over, curves)]
    for each in curves:
        parts.append(Text())
        if each.steps:
            named = ", ".join(str(point.size) for point in each.steps[:_STEPS])
            rest = f" and {len(each.steps) - _STEPS} more" if len(each.steps) > _STEPS else ""
            parts.append(Text(f"{each.name}: the rate falls right after {named}{rest}"))
        if not each.dips:
            parts.append(Text(f"{each.name}: no size is slower than a larger one nearby.", style="green"))
            continue
        parts += [Text(f"{each.name}: sizes slower than a larger one", style="bold"), _dips(sweep.over, each)]
        if (more := len(each.dips) - _DIPS) > 0:
            parts.append(Text(f"and {more} more; --output-format json lists them all", style="dim"))
    parts += [Text(), Text(f"Times: {PROVENANCE[curves[0].provenance]}.", style="dim")]
    return Group(*parts)


def _knees(over: str, curves: list[Curve]) -> Table:
    """A line per curve: its knee and its best."""
    from tilefit import units

    table = output.table("", f">knee {over}", ">time", ">rate", f">best {over}", ">time", ">rate", ">dips")
    for each in curves:
        cells = []
        for point in (each.knee, each.best):
            cells += (
                [str(point.size), units.seconds(point.time_s), units.rate(point.flop_per_s)]
                if point
                else ["–", "", ""]
            )
        table.add_row(each.name, *cells, str(sum(len(dip.points) for dip in each.dips)))
    return table


def _sizes(over: str, curves: list[Curve]) -> Table:
    """The rate of each curve side by side, at the roundest of the sizes."""
    from tilefit import units

    every = [point.size for point in curves[0].points]
    step = 1
    while len(shown := {size for size in every if size % step == 0}) > _ROWS:
        step *= 2
    table = output.table(over, *(f">{each.name}" for each in curves))
    for points in zip(*(each.points for each in curves), strict=True):
        if points[0].size in shown | {every[0], every[-1]}:
            table.add_row(
                str(points[0].size),
                *(f"{units.seconds(p.time_s)}, {units.rate(p.flop_per_s)}" for p in points),
            )
    return table


def _dips(over: str, curve: Curve) -> Table:
    """The slow sizes of a curve, and where to move."""
    from tilefit import units

    table = output.table(over, ">sizes", ">slowest", f">next {over}", ">time", ">speedup", "kernels")
    for dip in curve.dips[:_DIPS]:
        first, last = dip.points[0].size, dip.points[-1].size
        old, new = ("+".join(point.kernel_families) for point in (dip.worst, dip.better))
        table.add_row(
            str(first) if first == last else f"{first}–{last}",
            str(len(dip.points)),
            units.seconds(dip.worst.time_s),
            str(dip.better.size),
            units.seconds(dip.better.time_s),
            f"{dip.speedup:.2f}x",
            old if old == new else f"{old} -> {new}",
        )
    return table
