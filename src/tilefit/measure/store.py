"""The local store of measurements: one SQLite file, safe for several processes, never overwritten.

Every measurement is committed when it is made, so an interrupted benchmark loses none and a restarted one
skips what is there.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from tilefit.errors import TilefitError, UsageError
from tilefit.measure.environment import Environment
from tilefit.ops import Op
from tilefit.paths import corrupt_name, data_folder

_SCHEMA = 1
_BUSY_S = 30.0

_TABLE = """
CREATE TABLE IF NOT EXISTS measurement (
    op TEXT NOT NULL, cold INTEGER NOT NULL,
    gpu TEXT NOT NULL, driver TEXT NOT NULL, torch TEXT NOT NULL, cuda TEXT NOT NULL, cudnn TEXT NOT NULL,
    source TEXT NOT NULL, date TEXT NOT NULL,
    median_s REAL NOT NULL, low_s REAL NOT NULL, high_s REAL NOT NULL,
    replays INTEGER NOT NULL, calls INTEGER NOT NULL,
    sm_mhz INTEGER, power_w REAL, throttle_reasons INTEGER,
    PRIMARY KEY (op, cold, gpu, driver, torch, cuda, cudnn)
)
"""
#: Points of sweeps: whole steps, by a key of everything they depend on.
_POINTS = """
CREATE TABLE IF NOT EXISTS point (key TEXT PRIMARY KEY, date TEXT NOT NULL, data TEXT NOT NULL)
"""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured operation, with what it was measured on and how.

    Attributes:
        op: What ran.
        environment: GPU and versions.
        median_s, low_s, high_s: Median and 20th and 80th percentile over the replays, per call.
        replays, calls: How many replays, of how many calls each.
        cold: Operands were not in L2.
        source: Suite, model or command it was measured for.
        date: UTC, ISO 8601.
        sm_mhz, power_w, throttle_reasons: The card's state right after; None where it could not be read.
    """

    op: Op
    environment: Environment
    median_s: float
    low_s: float
    high_s: float
    replays: int
    calls: int
    cold: bool
    source: str = ""
    date: str = ""
    sm_mhz: int | None = None
    power_w: float | None = None
    throttle_reasons: int | None = None


def default_path() -> Path:
    """``$TILEFIT_STORE``, else ``tilefit/measurements.db`` below the user's data directory."""
    return Path(os.environ.get("TILEFIT_STORE") or _own_path())


def _own_path() -> Path:
    return data_folder() / "measurements.db"


class Store:
    """A store of measurements; a context manager.

    Args:
        path: The SQLite file; created with its folder where missing.

    Attributes:
        set_aside: Where a corrupt file found at ``path`` was moved to; None when the file was sound. Tell the
            user.

    Raises:
        TilefitError: the file is of a newer version or something else's, or cannot be opened or created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set_aside: Path | None = None
        # What somebody named may be anything of theirs.
        if path != _own_path() and not _may_be_a_database(path):
            raise _foreign(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._connection = _open(path)
            except _CorruptError:
                self.set_aside = _set_aside(path)
                self._connection = _open(path)
        except (OSError, sqlite3.Error, _CorruptError) as error:
            raise TilefitError(
                f"the store of measurements cannot be opened: {error}",
                where=str(path),
                hint="Choose another file with --store or TILEFIT_STORE.",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._connection.close()

    def has(self, op: Op, environment: Environment, cold: bool) -> bool:
        """Whether the operation was measured in this environment."""
        row = self._connection.execute(
            "SELECT 1 FROM measurement WHERE op = ? AND cold = ? AND gpu = ? AND driver = ? AND torch = ?"
            " AND cuda = ? AND cudnn = ?",
            (_op_text(op), cold, *asdict(environment).values()),
        ).fetchone()
        return row is not None

    def add(self, measurements: Iterable[Measurement]) -> None:
        """Write measurements at once; a repeated one replaces the older."""
        rows = [_row(measurement) for measurement in measurements]
        if not rows:
            return
        columns = list(rows[0])
        with self._connection:
            self._connection.executemany(
                f"INSERT OR REPLACE INTO measurement ({', '.join(columns)})"
                f" VALUES ({', '.join('?' for _ in columns)})",
                [tuple(row.values()) for row in rows],
            )

    def point(self, key: str) -> str | None:
        """What :meth:`keep_point` kept under a key."""
        row = self._connection.execute("SELECT data FROM point WHERE key = ?", (key,)).fetchone()
        return str(row[0]) if row else None

    def keep_point(self, key: str, data: str) -> None:
        """Keep a point of a sweep; a repeated one replaces the older."""
        with self._connection:
            self._connection.execute(
                "INSERT OR REPLACE INTO point VALUES (?, datetime('now'), ?)", (key, data)
            )

    def __iter__(self) -> Iterator[Measurement]:
        """All measurements, oldest first."""
        cursor = self._connection.execute("SELECT * FROM measurement ORDER BY date, rowid")
        names = [column[0] for column in cursor.description]
        for values in cursor:
            yield _measurement(dict(zip(names, values, strict=True)))

    def __len__(self) -> int:
        return int(self._connection.execute("SELECT COUNT(*) FROM measurement").fetchone()[0])


class _CorruptError(Exception):
    """The file is no store, or a broken one."""


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_S)
    try:
        _check(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
        with connection:
            connection.execute(_TABLE)
            connection.execute(_POINTS)
            connection.execute(f"PRAGMA user_version = {_SCHEMA}")
    except sqlite3.OperationalError:
        connection.close()  # locked, read-only, full: not broken
        raise
    except sqlite3.DatabaseError as error:
        connection.close()
        raise _CorruptError(str(error)) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection, path: Path) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > _SCHEMA:
        raise TilefitError(
            f"the store is of version {version}, this tilefit reads {_SCHEMA}",
            where=str(path),
            hint="Upgrade tilefit, or choose another file with --store.",
        )
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and "measurement" not in tables:
        raise _foreign(path)
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise _CorruptError(verdict)


def _may_be_a_database(path: Path) -> bool:
    """Whether there is no file, an empty one, or one that begins as SQLite's do."""
    if not path.is_file():
        return True
    with path.open("rb") as file:
        return file.read(16) in (b"", b"SQLite format 3\0")


def _foreign(path: Path) -> TilefitError:
    return TilefitError(
        "the file is no store of measurements; it was left as it is",
        where=str(path),
        hint="Choose another file with --store or TILEFIT_STORE, or a new one, which is created.",
    )


def _set_aside(path: Path) -> Path:
    """Rename a broken file and its journals; nothing is deleted or overwritten."""
    target = corrupt_name(path)
    for suffix in ("-wal", "-shm"):
        journal = path.with_name(path.name + suffix)
        if journal.exists():
            journal.rename(target.with_name(target.name + suffix))
    path.rename(target)
    return target


def _op_text(op: Op) -> str:
    return json.dumps([op.kind, asdict(op)], separators=(",", ":"))  # type: ignore[call-overload]


def _op(text: str) -> Op:
    kind, values = json.loads(text)
    return Op.KINDS[kind](**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def _row(measurement: Measurement) -> dict[str, Any]:
    row = {f.name: getattr(measurement, f.name) for f in fields(measurement)}
    environment = row.pop("environment")
    row["op"] = _op_text(measurement.op)
    row["cold"] = int(measurement.cold)
    return {**row, **asdict(environment)}


def _measurement(row: dict[str, Any]) -> Measurement:
    try:
        environment = Environment(**{f.name: row.pop(f.name) for f in fields(Environment)})
        op = _op(row.pop("op"))
        return Measurement(op=op, environment=environment, cold=bool(row.pop("cold")), **row)
    except (KeyError, TypeError, ValueError) as error:
        raise TilefitError(f"not a measurement: {error!r}") from error


# --- Parquet ---------------------------------------------------------------------------------------


def export_parquet(measurements: Iterable[Measurement], path: Path) -> int:
    """Write measurements as Parquet, to share or to analyse; returns how many.

    Raises:
        UsageError: pyarrow is not installed.
    """
    pyarrow, parquet = _pyarrow()
    rows = [_row(measurement) for measurement in measurements]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression="zstd")
    return len(rows)


def read_parquet(path: Path) -> list[Measurement]:
    """The measurements of a file that :func:`export_parquet` wrote.

    Raises:
        UsageError: pyarrow is not installed.
        TilefitError: the file cannot be read, or holds something else.
    """
    pyarrow, parquet = _pyarrow()
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise TilefitError(f"the file cannot be read as Parquet: {error}", where=str(path)) from error
    return [_measurement(row) for row in rows]


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow  # type: ignore[import-untyped,import-not-found,unused-ignore]
        import pyarrow.parquet  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise UsageError(
            "Parquet needs pyarrow, which is not installed", hint="Run: pip install pyarrow."
        ) from error
    return pyarrow, pyarrow.parquet
