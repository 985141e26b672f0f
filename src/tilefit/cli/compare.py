"""``tilefit compare``: two reports, or two sets of measurements, operation by operation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilefit.cli import bench, output, report_output
from tilefit.cli.option_groups import grouped
from tilefit.errors import UsageError

if TYPE_CHECKING:
    from tilefit.measure.store import Measurement

_Shown = Annotated[
    report_output.Destination,
    report_output.only_whole(
        "Of reports: text, markdown or json; default: by the ending of the file, else text."
    ),
]
#: How every SQLite file begins (its file format, section 1.3).
_SQLITE = b"SQLite format 3\0"


@grouped
def compare(
    first: Annotated[
        Path,
        typer.Argument(
            metavar="A",
            show_default=False,
            help="A report (.json), or measurements: a store, or a Parquet file.",
        ),
    ],
    second: Annotated[Path, typer.Argument(metavar="B", show_default=False, help="The other.")],
    *,
    limit: Annotated[int, typer.Option(min=0, help="Operations shown; 0: all.")] = 30,
    shown: _Shown,
) -> None:
    """Compare two reports of a step, or the measurements of two GPUs or versions: B against A.

    Of reports: what got faster or slower, and why. Exit code: 0, or 2 could not run.
    """
    reports = [path.suffix == ".json" for path in (first, second)]
    if all(reports):
        from tilefit.report import load
        from tilefit.report.changes import changes

        every = changes(load(first, note=output.note), load(second, note=output.note))
        shown.show(every, limit=limit)
        return
    if any(reports):
        _check_measurements(second if reports[0] else first)
        raise UsageError(
            "one is a report and the other holds measurements",
            where=f"{first}, {second}",
            hint="Name two reports (.json), or two sets of measurements.",
        )
    if shown.output_format not in (None, "text") or shown.output_file is not None:
        raise UsageError("measurements are compared as text", hint="Leave the options of the output out.")
    _measurements(first, second, limit)


def _measurements(first: Path, second: Path, limit: int) -> None:
    from tilefit import units
    from tilefit.measure.comparison import compare as compared
    from tilefit.measure.comparison import geometric_mean_ratio

    pairs = compared(_read(first), _read(second))
    if not pairs:
        raise UsageError(
            "the two hold no operation in common",
            where=f"{first}, {second}",
            hint="Measure the same suite with both: tilefit bench suite deepbench --store FILE.",
        )
    table = output.table("Operation", "Shape", "Type", ">A", ">B", ">B / A", "")
    for pair in pairs[: limit or None]:
        op = pair.op
        table.add_row(
            f"{op.kind} {getattr(op, 'layout', '')}{getattr(op, 'direction', '')}".strip(),
            op.shape,
            op.dtype,
            units.seconds(pair.first_s),
            units.seconds(pair.second_s),
            f"{pair.ratio:.3f}",
            "" if pair.differs else "within the noise",
        )
    console = output.stdout()
    console.print(table)
    slower = sum(pair.differs and pair.ratio > 1 for pair in pairs)
    faster = sum(pair.differs and pair.ratio < 1 for pair in pairs)
    same = len(pairs) - slower - faster
    console.print(
        f"{len(pairs)} operations in both: geometric mean B / A {geometric_mean_ratio(pairs):.3f}; "
        f"B is slower in {slower}, faster in {faster}, the same within the noise in {same}."
    )


def _read(path: Path) -> list[Measurement]:
    from tilefit.measure.store import read_parquet

    _check_measurements(path)
    if path.suffix == ".parquet":
        return read_parquet(path)
    with bench.open_store(path) as store:
        return list(store)


def _check_measurements(path: Path) -> None:
    """Refuse a file that is no Parquet file by its name and no store: opening one sets aside what is none."""
    if not path.is_file():
        raise UsageError(
            "a folder, not a file" if path.is_dir() else "no such file",
            where=str(path),
            hint="Name two reports (.json), or two sets of measurements.",
        )
    if path.suffix == ".parquet":
        return
    with path.open("rb") as file:
        is_store = file.read(len(_SQLITE)) == _SQLITE
    if not is_store:
        raise UsageError(
            "neither a report nor measurements",
            where=str(path),
            hint="Name reports (.json), stores of tilefit bench (--store), or Parquet files (.parquet).",
        )
