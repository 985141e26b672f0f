from __future__ import annotations

import multiprocessing
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from tilefit.errors import TilefitError
from tilefit.measure.environment import Environment
from tilefit.measure.store import Measurement, Store, default_path, export_parquet, read_parquet
from tilefit.ops import Attention, Conv2d, Gemm, Op, Recurrent, Streaming

H200 = Environment("NVIDIA H200", "580.159", "2.11.0", "13.0", "91900")
OPS: list[Op] = [
    Gemm(5, 7, 11, layout="NT", ld_a=40),
    Conv2d(2, 8, 16, 9, 3, 2, 1, channels_last=True),
    Attention(2, 4, 16, 8, is_causal=True),
    Recurrent("LSTM", 6, 8, 5, 3, bidirectional=True),
    Streaming("softmax", 100, 400, 400, inner=10),
]


def measured(op: Op, median_s: float = 1e-5, *, cold: bool = True) -> Measurement:
    return Measurement(
        op, H200, median_s, 0.9e-5, 1.1e-5, 9, 100, cold, "test", "2026-01-02T03:04:05Z", 1980, 350.5, 0
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new folder" / "measurements.db"


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.kind)
def test_what_is_written_is_read_back_by_another(path: Path, op: Op) -> None:
    with Store(path) as store:
        store.add([measured(op)])
    with Store(path) as store:
        assert list(store) == [measured(op)]


def test_it_knows_what_was_measured(path: Path) -> None:
    with Store(path) as store:
        store.add([measured(OPS[0])])
        assert store.has(OPS[0], H200, cold=True)
        assert not store.has(OPS[0], H200, cold=False)
        assert not store.has(OPS[1], H200, cold=True)
        assert not store.has(OPS[0], replace(H200, driver="999"), cold=True)


def test_measuring_again_replaces(path: Path) -> None:
    with Store(path) as store:
        store.add([measured(OPS[0], 1e-5), measured(OPS[0], 2e-5, cold=False)])
        store.add([measured(OPS[0], 3e-5)])
        assert sorted(m.median_s for m in store) == [2e-5, 3e-5]


def _write(path: Path, m: int, count: int) -> None:
    with Store(path) as store:
        for n in range(1, count + 1):
            store.add([measured(Gemm(m, n, 8))])


def test_processes_write_at_once_and_lose_nothing(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, m, 40)) for m in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert [writer.exitcode for writer in writers] == [0, 0]
    with Store(path) as store:
        assert len(store) == 80


def test_an_interrupted_writer_leaves_what_it_finished(path: Path) -> None:
    store = Store(path)
    store.add([measured(OPS[0])])
    # Not closed: as after a kill, the write-ahead log still stands beside the file.
    with Store(path) as other:
        assert len(other) == 1


@pytest.mark.parametrize("damage", ["text", "torn page"])
def test_a_corrupt_store_is_set_aside_and_kept(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TILEFIT_STORE", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = default_path()
    with Store(path) as store:
        store.add([measured(Gemm(m, 8, 8)) for m in range(1, 300)])
    content = bytearray(path.read_bytes())
    content[:] = b"not a database " * 100 if damage == "text" else content
    if damage == "torn page":
        content[4096:20000] = b"\xaa" * (20000 - 4096)
    path.write_bytes(content)

    with Store(path) as store:
        assert store.set_aside is not None
        assert store.set_aside.read_bytes() == content
        assert len(store) == 0
        store.add([measured(OPS[0])])
    with Store(path) as store:
        assert store.set_aside is None
        assert len(store) == 1


@pytest.mark.parametrize("kind", ["text", "text of the variable", "another program's database"])
def test_a_file_that_is_no_store_is_left_alone(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.csv"
    if kind == "text of the variable":
        monkeypatch.setenv("TILEFIT_STORE", str(path))
    if kind.startswith("text"):
        path.write_text("model,seconds\nmine,1.0\n")
    else:
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE bookmarks (name TEXT)")
        connection.commit()
        connection.close()
    before = path.read_bytes()
    with pytest.raises(TilefitError, match="no store of measurements") as error:
        Store(path)
    assert "results.csv" in str(error.value)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_newer_store_is_left_alone(path: Path) -> None:
    with Store(path):
        pass
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(TilefitError, match="version 99"):
        Store(path)
    assert path.read_bytes() == before


def test_a_place_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TilefitError, match="cannot be opened") as error:
        Store(tmp_path / "file" / "measurements.db")
    assert "--store" in str(error.value)


def test_the_default_place_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEFIT_STORE", str(tmp_path / "mine.db"))
    assert default_path() == tmp_path / "mine.db"
    monkeypatch.delenv("TILEFIT_STORE")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_path() == tmp_path / "tilefit" / "measurements.db"


def test_parquet_holds_everything(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with Store(path) as store:
        store.add([measured(op) for op in OPS])
        assert export_parquet(store, tmp_path / "out.parquet") == len(OPS)
    assert sorted(read_parquet(tmp_path / "out.parquet"), key=str) == sorted(map(measured, OPS), key=str)


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "bad.parquet").write_text("nonsense")
    with pytest.raises(TilefitError, match=r"bad\.parquet"):
        read_parquet(tmp_path / "bad.parquet")
