"""``tilefit compare``: two sets of measurements, operation by operation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilefit.cli import bench, output

if TYPE_CHECKING:
    from tilefit.measure.store import Measurement


def compare(
    first: Annotated[
        Path, typer.Argument(metavar="A", show_default=False, help="A store, or a Parquet file.")
    ],
    second: Annotated[Path, typer.Argument(metavar="B", show_default=False, help="The other.")],
    limit: Annotated[int, typer.Option(min=0, help="Operations shown; 0: all.")] = 30,
) -> None:
    """Compare the measurements of two GPUs, drivers or versions: B against A, largest change first."""
    from tilefit import units
    from tilefit.errors import UsageError
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
    from tilefit.errors import UsageError
    from tilefit.measure.store import read_parquet

    if not path.is_file():
        raise UsageError("no such file", where=str(path))
    if path.suffix == ".parquet":
        return read_parquet(path)
    with bench.open_store(path) as store:
        return list(store)
