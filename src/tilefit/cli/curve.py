"""``tilefit curve``: time and rate while one size varies, with the knee, the dips and where to move."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tilefit.cli import output, step_options
from tilefit.cli.bench import StoreFile, open_store
from tilefit.cli.calibration_option import CalibrationFile
from tilefit.cli.commands import TargetGroup, Verbs
from tilefit.cli.completion import GpuName
from tilefit.cli.curve_sizes import read_sizes
from tilefit.cli.destination import Destination, Where
from tilefit.cli.local_gpu import LocalGpu, devices
from tilefit.cli.option_groups import Group, grouped
from tilefit.errors import UsageError
from tilefit.options import AnyOptions, ProgramOptions, TargetOptions, option, spelled

if TYPE_CHECKING:
    from tilefit.measure.curve import Measured
    from tilefit.ops import Gemm, Op
    from tilefit.session.curves import Drawn, Measuring

app = Verbs(
    name="curve",
    cls=TargetGroup,
    help="Plot time and rate while one size varies: the knee, the dips, the next efficient size. "
    "`tilefit curve TARGET --batch 1:256` does it for a model's whole step. "
    "The size that varies is written FIRST:LAST, or FIRST:LAST:STEP for FIRST and the multiples of STEP up "
    "to LAST.",
    no_args_is_help=True,
)

Dtype = Annotated[str, typer.Option(metavar="TYPE", help="bf16, fp16, tf32, fp32, fp8, …")]
Measure = Annotated[
    bool, typer.Option("--measure", help="Measure on this machine's GPU too; interrupted, it continues.")
]
#: The range of ``--over batch`` and ``--over seq`` for a model; what exceeds the memory is left out.
_DEFAULT_RANGE = "1:1024"
_OVER = "Size that varies, where none is a range: from 1 to the one given."


@app.command()
@grouped
def gemm(
    m: Annotated[str, typer.Argument(help="Rows of C, or a range.", show_default=False)],
    n: Annotated[str, typer.Argument(help="Columns of C, or a range.", show_default=False)],
    k: Annotated[str, typer.Argument(help="Contraction, or a range.", show_default=False)],
    *,
    over: Annotated[Literal["m", "n", "k", "batch"] | None, typer.Option(help=_OVER)] = None,
    gpu: GpuName = None,
    calibration: CalibrationFile = None,
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
    measure: Measure = False,
    store: StoreFile = None,
    where: Where,
) -> None:
    """A product C[m,n] = A[m,k] @ B[k,n]: tilefit curve gemm 1:512 4096 4096 --gpu h200."""
    from tilefit.ops import Gemm
    from tilefit.session.curves import product_curves

    device, local = devices(gpu, measure, calibration)
    sizes = read_sizes({"m": m, "n": n, "k": k, "batch": batch}, over)

    def products(letters: str) -> Callable[[int], tuple[Gemm, ...]]:
        return lambda size: (Gemm(**sizes.at(size), dtype=dtype, layout=letters),)  # type: ignore[arg-type]

    title = f"gemm {sizes.text(('m', 'n', 'k', 'batch'))} {dtype}"
    names = dict.fromkeys(layout or ["TN"])
    by_name = {name: products(name) for name in names}
    _show(product_curves(title, sizes, by_name, device, _measuring(local, store)), where)


@app.command()
@grouped
def linear(
    *,
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
    calibration: CalibrationFile = None,
    dtype: Dtype = "bf16",
    measure: Measure = False,
    store: StoreFile = None,
    where: Where,
) -> None:
    """A linear layer: tilefit curve linear --rows 16384 --in 768 --out 50200:50400 --gpu h200."""
    from tilefit.cost import curve
    from tilefit.session.curves import product_curves

    over = {"rows": "batch", "hidden": "in", "vocab": "out"}.get(over or "", over)  # type: ignore[assignment]
    device, local = devices(gpu, measure, calibration)
    sizes = read_sizes({"in": in_features, "out": out_features, "batch": batch, "seq": seq}, over)

    def products(size: int) -> tuple[Gemm, ...]:
        at = sizes.at(size)
        return curve.linear(at["batch"] * at["seq"], at["in"], at["out"], dtype, train=train)

    title = f"linear {sizes.text(('in', 'out', 'batch', 'seq'))} {dtype}"
    by_name = {"layer" if train else "forward": products}
    _show(product_curves(title, sizes, by_name, device, _measuring(local, store)), where)


@dataclass(frozen=True)
class Ranges:
    """The sizes of a model and of its inputs: texts, of which one is a range."""

    batch: str | None = option(None, "Samples, or a range.", metavar="N")
    seq: str | None = option(None, "Tokens per sample, or a range.", metavar="N")
    image_size: str | None = option(None, "Height and width of an image, or a range.", metavar="N")
    hidden: str | None = option(None, "Width of the model, or a range with its step.", metavar="N")
    vocab: str | None = option(None, "Vocabulary, or a range.", metavar="N")
    settings: tuple[str, ...] = option(
        (),
        "Another size of the model, or a range: an argument of the function that builds it, or an "
        "attribute of its configuration; repeat.",
        "--set",
        metavar="NAME=N",
    )
    over: str | None = option(
        None,
        "Size that varies where none is a range: batch or seq, from 1 to the one given or to 1024.",
        metavar="NAME",
    )


@app.command()
@grouped
def target(
    context: typer.Context,
    target: step_options.Target,
    arguments: step_options.Arguments = None,
    *,
    ranges: Annotated[Ranges, Group("Options")],
    gpu: GpuName = None,
    input: step_options.Input = None,
    how: step_options.OfStep,
    capture: step_options.Capture,
    program: step_options.OfProgram,
    measure: Measure = False,
    store: StoreFile = None,
    calibration: CalibrationFile = None,
    where: Where,
) -> None:
    """The whole step of a model or program: tilefit curve hf:gpt2 --batch 1:128 --amp bf16 --gpu h200.

    Step time, throughput and TFLOP/s. Batch, sequence and vocabulary are captured at four sizes and
    interpolated where the step allows it; the other sizes are captured one by one. A program is run with the
    sizes that its arguments leave open: tilefit curve train.py --batch 8:256 -- --batch-size {batch}.
    """
    asked = step_options.asked(
        context, target, how, program, arguments, own=[each.name for each in fields(Ranges)]
    )
    over = ranges.over.replace("-", "_") if ranges.over else None
    sizes = read_sizes(_given(ranges, over), over, of_step=True)

    options: AnyOptions = (
        asked
        if isinstance(asked, ProgramOptions)
        else TargetOptions(**asdict(asked), input=tuple(input or ()))
    )
    for name, size in sizes.fixed.items():
        options = options.at_size(name, size, varies=False)
    options.require_places([*sizes.fixed, *({sizes.over} - {"batch"})])

    from tilefit.session.curves import StepCurve

    device, local = devices(gpu, measure, calibration)
    curve = StepCurve(
        target=target,
        options=options,
        sizes=sizes,
        gpu=device,
        timeout_s=capture.timeout,
        fresh=capture.fresh,
    )
    drawn = curve.drawn(output.watched, _measuring(local, store))
    if drawn.captured < len(sizes.values) and drawn.interrupted:
        print(f"Stopped early: {drawn.captured} of {len(sizes.values)} sizes.", file=sys.stderr)
    _show(drawn, where)


def _given(ranges: Ranges, over: str | None) -> dict[str, str]:
    """The sizes as typed, by name; those of ``--set`` too.

    Raises:
        UsageError: a setting is not of the form NAME=N, a size is given twice, or ``--over`` needs a range.
    """
    named = {name: text for name, text in asdict(ranges).items() if name not in ("settings", "over")}
    given = {name: text for name, text in named.items() if text is not None}
    for setting in ranges.settings:
        name, sign, text = setting.partition("=")
        if not sign or not name.isidentifier():
            raise UsageError(
                f"cannot read --set {setting}", hint="Write --set NAME=N or --set NAME=FIRST:LAST."
            )
        if name in given:
            raise UsageError(f"the size {name} is given twice")
        given[name] = text
    if over in ("batch", "seq"):
        given.setdefault(over, _DEFAULT_RANGE)
    elif over and ":" not in given.get(over, ""):
        option = f"{spelled(over)} " if over in named else f"--set {over}="
        raise UsageError(f"--over {over} needs a range", hint=f"Write {option}FIRST:LAST or FIRST:LAST:STEP.")
    return given


def _measuring(local: LocalGpu | None, store: Path | None) -> Measuring | None:
    """Measures operations on this machine's GPU, into the store; None where nothing is to be measured."""
    if local is None:
        return None
    from tilefit.measure.curve import measure_ops
    from tilefit.measure.run import pool_for

    def measure(ops: Iterable[Op], source: str) -> Measured:
        with open_store(store) as opened:
            measured = measure_ops(
                ops,
                opened,
                pool_for(local.place),
                local.device,
                local.environment,
                source,
                watch=partial(output.watched, "Measuring"),
            )
        if measured.interrupted:
            print("Stopped early. Nothing measured is lost: the same command continues.", file=sys.stderr)
        return measured

    return measure


def _show(drawn: Drawn, where: Destination) -> None:
    where.write(drawn.curves)
    if drawn.interrupted:
        raise KeyboardInterrupt
