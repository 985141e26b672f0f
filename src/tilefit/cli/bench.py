"""``tilefit bench``: measure operations on this machine's GPU, into a store that survives interruption."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tilefit.capture.naming import require_readable
from tilefit.cli import output, step_options
from tilefit.cli.commands import TargetGroup, Verbs
from tilefit.cli.option_groups import Group, grouped
from tilefit.options import option

if TYPE_CHECKING:
    from tilefit.measure.run import Outcome
    from tilefit.measure.store import Measurement, Store
    from tilefit.measure.suites import Entry
    from tilefit.ops import Op


app = Verbs(
    name="bench",
    cls=TargetGroup,
    help="Measure operations on this machine's GPU. `tilefit bench TARGET` measures those of a model's step.",
    no_args_is_help=True,
)

Dtype = Annotated[str, typer.Option(help="Element type: bf16, fp16, tf32, fp32, fp8, int8.")]
StoreFile = Annotated[
    Path | None, typer.Option("--store", metavar="FILE", help="Store of measurements; default TILEFIT_STORE.")
]


@dataclass(frozen=True)
class Measuring:
    """How operations are measured, and into which store."""

    warm: bool = option(False, "Repeat on the same operands, so that they may stay in L2.")
    on_cpu: bool = option(False, "Run on the CPU: to try a command, not for its figures.")
    store: Path | None = option(None, "Store of measurements; default TILEFIT_STORE.", metavar="FILE")


How = Annotated[Measuring, Group("Options")]


@app.command()
@grouped
def gemm(
    m: Annotated[int, typer.Argument(min=1, show_default=False, help="Rows of C.")],
    n: Annotated[int, typer.Argument(min=1, show_default=False, help="Columns of C.")],
    k: Annotated[int, typer.Argument(min=1, show_default=False, help="Contraction.")],
    dtype: Dtype = "bf16",
    layout: Annotated[
        Literal["all", "TN", "NN", "NT", "TT"],
        typer.Option(help="BLAS letters (column-major); F.linear runs TN, its gradients NN and NT."),
    ] = "all",
    batch: Annotated[int, typer.Option(min=1, help="Independent products.")] = 1,
    *,
    how: How,
) -> None:
    """Measure a product C[m,n] = A[m,k] @ B[k,n]."""
    from tilefit.ops import Gemm

    layouts = ("TN", "NN", "NT") if layout == "all" else (layout,)
    ops = [Gemm(m, n, k, dtype=dtype, layout=letters, batch=batch) for letters in layouts]
    _bench_ops(ops, "bench gemm", how)


@app.command()
@grouped
def conv(
    batch: Annotated[int, typer.Argument(min=1, show_default=False, help="Samples.")],
    in_channels: Annotated[int, typer.Argument(min=1, show_default=False)],
    out_channels: Annotated[int, typer.Argument(min=1, show_default=False)],
    size: Annotated[int, typer.Argument(min=1, show_default=False, help="Height and width of the input.")],
    kernel: Annotated[int, typer.Argument(min=1, show_default=False, help="Height and width of the kernel.")],
    stride: Annotated[int, typer.Option(min=1)] = 1,
    padding: Annotated[int | None, typer.Option(min=0, help="Default: half of the kernel.")] = None,
    groups: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Dtype = "bf16",
    channels_last: Annotated[
        bool, typer.Option("--channels-last/--channels-first", help="NHWC or NCHW.")
    ] = True,
    *,
    how: How,
) -> None:
    """Measure a convolution and its two gradients."""
    from tilefit.ops import Conv2d

    padding = kernel // 2 if padding is None else padding
    shape = batch, in_channels, out_channels, size, kernel
    op = Conv2d(*shape, stride, padding, groups=groups, dtype=dtype, channels_last=channels_last)
    _bench_ops(_passes(op), "bench conv", how)


@app.command()
@grouped
def attention(
    batch: Annotated[int, typer.Argument(min=1, show_default=False, help="Samples.")],
    heads: Annotated[int, typer.Argument(min=1, show_default=False, help="Query heads.")],
    seq: Annotated[int, typer.Argument(min=1, show_default=False, help="Positions.")],
    head_dim: Annotated[int, typer.Argument(min=1, show_default=False, help="Width of a head.")],
    kv_heads: Annotated[int, typer.Option(min=0, help="Key/value heads; 0: as many as query heads.")] = 0,
    causal: Annotated[bool, typer.Option("--causal", help="A position sees those before it.")] = False,
    dtype: Dtype = "bf16",
    *,
    how: How,
) -> None:
    """Measure fused attention, forward and backward."""
    from tilefit.ops import Attention

    op = Attention(batch, heads, seq, head_dim, num_kv_heads=kv_heads, is_causal=causal, dtype=dtype)
    _bench_ops(_passes(op), "bench attention", how)


@app.command()
@grouped
def rnn(
    mode: Annotated[str, typer.Argument(show_default=False, help="LSTM, GRU, RNN_TANH or RNN_RELU.")],
    input_size: Annotated[int, typer.Argument(min=1, show_default=False)],
    hidden_size: Annotated[int, typer.Argument(min=1, show_default=False)],
    steps: Annotated[int, typer.Argument(min=1, show_default=False, help="Time steps.")],
    batch: Annotated[int, typer.Argument(min=1, show_default=False, help="Samples.")],
    layers: Annotated[int, typer.Option(min=1)] = 1,
    bidirectional: Annotated[bool, typer.Option("--bidirectional")] = False,
    dtype: Dtype = "fp16",
    *,
    how: How,
) -> None:
    """Measure a recurrent layer: forward, data gradient, and both gradients (as backward-weight)."""
    from tilefit.ops import Recurrent

    sizes = input_size, hidden_size, steps, batch
    op = Recurrent(mode.upper(), *sizes, num_layers=layers, bidirectional=bidirectional, dtype=dtype)
    _bench_ops(_passes(op), "bench rnn", how)


@app.command()
@grouped
def suite(
    name: Annotated[Literal["deepbench"], typer.Argument(show_default=False, help="deepbench.")],
    only: Annotated[Literal["all", "gemm", "conv", "rnn"], typer.Option(help="A part of the suite.")] = "all",
    dtype: Dtype = "fp16",
    limit: Annotated[int, typer.Option(min=0, help="Stop after so many shapes of each part; 0: all.")] = 0,
    *,
    how: How,
) -> None:
    """Measure a published list of shapes, beside its published times.

    Interrupted, it continues where it stopped.
    """
    from tilefit.measure import suites

    parts = {"gemm": suites.deepbench_gemm, "conv": suites.deepbench_conv, "rnn": suites.deepbench_rnn}
    entries = []
    for part, shapes in parts.items():
        if only in ("all", part):
            entries += shapes(dtype)[: limit or None]
    _bench(entries, how)


@app.command()
@grouped
def target(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", show_default=False, help="As of `tilefit check`.")
    ],
    *,
    options: step_options.OfOperations,
    how: How,
) -> None:
    """Measure every distinct operation of a model's step."""
    require_readable(target)
    from tilefit.capture.child import capture_in_child

    with output.progress(f"Capturing {target}"):
        step = capture_in_child(target, options)
    _bench_ops(dict.fromkeys(entry.op for entry in step.ops), target, how)


@app.command(name="export")
def export_(
    file: Annotated[Path, typer.Argument(show_default=False, help="Parquet file to write.")],
    store: StoreFile = None,
) -> None:
    """Write the store as Parquet, to share or to analyse."""
    from tilefit.measure.store import export_parquet

    with open_store(store) as opened:
        count = export_parquet(opened, file)
    print(f"{count} measurements written to {file}", file=sys.stderr)


@app.command(name="import")
def import_(
    file: Annotated[Path, typer.Argument(show_default=False, help="Parquet file to read.")],
    store: StoreFile = None,
) -> None:
    """Add the measurements of a Parquet file to the store."""
    from tilefit.measure.store import read_parquet

    measurements = read_parquet(file)
    with open_store(store) as opened:
        opened.add(measurements)
    print(f"{len(measurements)} measurements read from {file}", file=sys.stderr)


def open_store(path: Path | None) -> Store:
    """The store at a path or at the default place; says so where a corrupt one was set aside."""
    from tilefit.measure.store import Store, default_path

    store = Store(path or default_path())
    if store.set_aside:
        print(
            f"warning: {store.path} was corrupt. It was kept as {store.set_aside}; a new store was begun.",
            file=sys.stderr,
        )
    return store


def _passes(op: Op) -> list[Op]:
    """An operation in each of its passes."""
    return [replace(op, direction=each) for each in op.passes]  # type: ignore[type-var]


def _bench_ops(ops: Iterable[Op], source: str, how: Measuring) -> None:
    from tilefit.measure.suites import Entry

    _bench([Entry(op, source) for op in ops], how)


def _bench(entries: Sequence[Entry], how: Measuring) -> None:
    """Measure into the store and print a table, also when interrupted."""
    import torch

    from tilefit.measure import timer
    from tilefit.measure.environment import current
    from tilefit.measure.run import pool_for, run_suite

    device: timer.Device = timer.HostDevice() if how.on_cpu else timer.CudaDevice()
    place = torch.device("cpu" if how.on_cpu else "cuda")
    outcomes: list[Outcome] = []
    with open_store(how.store) as store:
        environment = current(place)
        running = run_suite(entries, store, pool_for(place), device, environment, cold=not how.warm)
        try:
            for outcome in output.watched("Measuring", running, len(entries)):
                outcomes.append(outcome)
        finally:
            done = {(m.op, m.cold): m for m in store if m.environment == environment}
            rows = [(o.entry, done.get((o.entry.op, not how.warm)), o.error) for o in outcomes]
            output.stdout().print(_table(rows, environment.gpu))
            kept = sum(outcome.measurement is None and not outcome.error for outcome in outcomes)
            failed = sum(bool(outcome.error) for outcome in outcomes)
            words = f"{len(outcomes)} of {len(entries)} shapes, {kept} of them from {store.path}"
            print(words + (f", {failed} failed" if failed else ""), file=sys.stderr)
            if len(outcomes) < len(entries):
                print("Stopped early. Nothing measured is lost: the same command continues.", file=sys.stderr)


def _table(rows: list[tuple[Entry, Measurement | None, str]], gpu: str) -> Any:
    from tilefit import units
    from tilefit.ops import Streaming

    published = list(dict.fromkeys(key for entry, _, _ in rows for key in entry.published_ms or {}))
    predicted = _predictions([entry for entry, _, _ in rows], gpu)
    columns = ["Operation", "Shape", "Type", ">Time", ">Spread", ">Rate", ">Predicted"]
    table = output.table(*columns, *(f">{name}" for name in published))
    for (entry, measured, error), guess in zip(rows, predicted, strict=True):
        op = entry.op
        what = " ".join(
            filter(
                None,
                (op.kind, getattr(op, "direction", ""), getattr(op, "layout", ""), getattr(op, "role", "")),
            )
        )
        line = [what, op.shape, op.dtype]
        if measured is None:
            line += [f"failed: {error.splitlines()[0]}", "", ""]
        else:
            spread = (measured.high_s - measured.low_s) / measured.median_s
            rate = (
                f"{units.size(op.moved_bytes / measured.median_s)}/s"
                if isinstance(op, Streaming)
                else units.rate(op.flop / measured.median_s)
            )
            line += [units.seconds(measured.median_s), units.share(spread), rate]
        line.append(units.seconds(guess) if guess else "")
        times = entry.published_ms or {}
        line += [units.seconds(times[name] / 1e3) if name in times else "" for name in published]
        table.add_row(*line)
    return table


def _predictions(entries: list[Entry], gpu: str) -> list[float | None]:
    """What tilefit predicts for each, where it knows the GPU."""
    from tilefit import gpus
    from tilefit.cost import estimate
    from tilefit.errors import UsageError

    try:
        device = gpus.get(gpu)
    except UsageError:
        return [None] * len(entries)
    return [estimate(entry.op, device).time_s for entry in entries]
