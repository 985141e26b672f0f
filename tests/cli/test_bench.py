"""``tilefit bench`` and ``tilefit compare``, on the CPU: the figures mean nothing, the rest does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import typer

from tilefit.cli import bench, compare
from tilefit.errors import TilefitError, UsageError
from tilefit.measure.store import Store, default_path

Run = Callable[..., str]
APP = typer.Typer()
APP.add_typer(bench.app)
APP.command()(compare.compare)


@pytest.fixture(autouse=True)
def _restore_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "measurements.db"
    monkeypatch.setenv("TILEFIT_STORE", str(path))
    monkeypatch.setenv("COLUMNS", "200")
    return path


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line and returns what it printed, both streams."""

    def call(*arguments: str) -> str:
        APP(list(arguments), standalone_mode=False)
        return "".join(capfd.readouterr())

    return call


def test_a_product_is_measured_in_its_three_layouts_and_kept(run: Run, store: Path) -> None:
    output = run("bench", "gemm", "16", "24", "32", "--dtype", "fp32", "--on-cpu")
    for layout in ("TN", "NN", "NT"):
        assert f"gemm {layout}" in output
    assert "16x24x32" in output
    with Store(store) as kept:
        assert len(kept) == 3


def test_what_was_measured_is_not_measured_again(run: Run) -> None:
    first = run("bench", "gemm", "16", "24", "32", "--dtype", "fp32", "--on-cpu")
    assert "3 of 3 shapes, 0 of them from" in first
    again = run("bench", "gemm", "16", "24", "32", "--dtype", "fp32", "--on-cpu")
    assert "3 of 3 shapes, 3 of them from" in again
    assert first.splitlines()[:4] == again.splitlines()[:4], "the table shows the stored times"


@pytest.mark.parametrize(
    "arguments",
    [
        ("conv", "2", "8", "16", "12", "3"),
        ("attention", "2", "2", "16", "8", "--causal"),
        ("rnn", "lstm", "8", "8", "4", "2"),
    ],
    ids=lambda a: a[0],
)
def test_other_kinds_are_measured_with_their_backward_pass(run: Run, arguments: tuple[str, ...]) -> None:
    output = run("bench", *arguments, "--dtype", "fp32", "--on-cpu")
    assert "forward" in output
    assert "backward" in output
    assert "failed" not in output


def test_deepbench_is_printed_beside_its_published_times(run: Run) -> None:
    output = run(
        "bench", "suite", "deepbench", "--only", "gemm", "--limit", "1", "--dtype", "fp32", "--on-cpu"
    )
    header, line = output.splitlines()[:2]
    assert "v100_mixed" in header
    assert "t4_mixed" in header
    assert "p100_fp32" in header
    assert "20.0 µs" in line


def test_a_failing_shape_is_shown_and_the_rest_measured(run: Run) -> None:
    # Not every CPU has oneDNN's products of fp8.
    with torch.backends.mkldnn.flags(enabled=False):
        output = run("bench", "gemm", "16", "16", "16", "--dtype", "fp8", "--on-cpu")
    assert output.count("failed:") == 2
    assert "fp8 matrices one at a time in layout TN" in output
    assert "2 failed" in output


def test_interrupting_keeps_and_prints_what_is_done(
    run: Run, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilefit.measure import run as running

    real, calls = running.measure_op, []

    def interrupted(*arguments, **options):  # type: ignore[no-untyped-def]
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(running, "measure_op", interrupted)
    printed = run("bench", "gemm", "16", "24", "32", "--dtype", "fp32", "--on-cpu")
    assert "2 of 3 shapes" in printed
    assert "the same command continues" in printed
    with Store(store) as kept:
        assert len(kept) == 2


def test_what_is_no_verb_is_a_model(run: Run, tmp_path: Path) -> None:
    model = tmp_path / "toy.py"
    model.write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(16, 32), torch.randn(8, 16)\n",
        encoding="utf-8",
    )
    output = run("bench", f"{model}:make", "--infer", "--on-cpu")
    assert "8x32x16" in output


def test_a_corrupt_store_is_reported(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEFIT_STORE", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    store = default_path()
    store.parent.mkdir()
    store.write_bytes(b"nonsense" * 1000)
    output = run("bench", "gemm", "8", "8", "8", "--dtype", "fp32", "--on-cpu")
    assert "was corrupt" in output
    assert len(list(store.parent.glob("*.corrupt-*"))) == 1


def test_measurements_travel_by_parquet(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    run("bench", "gemm", "8", "8", "8", "--dtype", "fp32", "--on-cpu")
    file, other = tmp_path / "shared.parquet", tmp_path / "other.db"
    assert "3 measurements written" in run("bench", "export", str(file))
    assert "3 measurements read" in run("bench", "import", str(file), "--store", str(other))
    output = run("compare", str(other), str(file))
    assert "3 operations in both: geometric mean B / A 1.000" in output
    assert output.count("within the noise") == 4


def test_comparing_what_shares_nothing_says_so(run: Run, tmp_path: Path, store: Path) -> None:
    with Store(store), Store(tmp_path / "b.db"):
        pass
    with pytest.raises(UsageError, match="no operation in common"):
        run("compare", str(store), str(tmp_path / "b.db"))
    with pytest.raises(UsageError, match="no such file"):
        run("compare", str(store), str(tmp_path / "c.db"))
    assert not (tmp_path / "c.db").exists()


def test_without_a_gpu_it_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TilefitError, match="no CUDA GPU"):
        run("bench", "gemm", "8", "8", "8")
