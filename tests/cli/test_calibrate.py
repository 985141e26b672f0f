"""``tilefit calibrate`` on a made-up GPU, and ``--calibration`` with what it writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from small_calibration import made
from tilefit import gpus
from tilefit.cost import estimate
from tilefit.cost.analytic import analytic
from tilefit.cost.calibration import read, write
from tilefit.cost.constants import GENERAL, link_constants
from tilefit.cost.links import Fabric, Group
from tilefit.cost.priced import priced
from tilefit.measure import calibration, ranks, sessions
from tilefit.measure.environment import Environment
from tilefit.measure.timer import HostDevice
from tilefit.ops import Gemm

A100 = gpus.get("a100")


@pytest.fixture
def _a100(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine has an A100 whose products follow the first stage with other constants."""
    from tilefit.cli import local_gpu

    here = local_gpu.LocalGpu(
        HostDevice(),
        torch.device("cpu"),
        Environment("NVIDIA A100-SXM4-80GB", "580", "2.11", "13.0", "91900"),
    )
    monkeypatch.setattr(local_gpu, "local_gpu", lambda: here)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    few = {"gemm": islice(calibration.candidates()["gemm"], 200)}
    monkeypatch.setattr(calibration, "SHARES", {"gemm": 1.0})
    monkeypatch.setattr(calibration, "candidates", lambda: few)

    def kernel_times(factories, session) -> list[float]:  # type: ignore[no-untyped-def]
        # What each builds is an instance of its operation.
        ops = [each.args[0] for each in factories]
        return [1.5 * analytic(op, A100, GENERAL).time_s for op in ops]

    monkeypatch.setattr(sessions, "kernel_times", kernel_times)
    monkeypatch.setattr(sessions, "session_kind", lambda: lambda: None)


@pytest.mark.usefixtures("_a100")
def test_it_writes_the_calibration_that_other_commands_then_use(tilefit, tmp_path: Path) -> None:
    before = tilefit("gemm", "4096", "4096", "4096", "--gpu", "a100").out
    assert "calibrated" not in before
    ran = tilefit("calibrate")
    assert ran.code == 0, ran.err
    path = tmp_path / "data" / "tilefit" / "calibrations" / f"{A100.name}.npz"
    assert f"Calibration written to {path}" in ran.err
    assert "gemm" in ran.out
    facts = read(path).about["networks"]["gemm"]
    assert facts["errors"]["calibrated"] < facts["errors"]["datasheet"]
    assert read(path).about["versions"]["torch"] == "2.11"
    after = tilefit("gemm", "4096", "4096", "4096", "--gpu", "a100").out
    assert "fitted to measurements of this GPU (calibrated on 20" in " ".join(after.split())


@pytest.mark.usefixtures("_a100")
def test_a_damaged_calibration_is_never_overwritten(
    tilefit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "calibrate", lambda gpu, *_, **__: made(gpu))
    out = tmp_path / "mine.npz"
    out.write_bytes(b"precious")
    ran = tilefit("calibrate", "--output", str(out))
    assert ran.code == 0, ran.err
    assert read(out).about["gpu"] == A100.name
    (aside,) = tmp_path.glob("mine.npz.corrupt-*")
    assert aside.read_bytes() == b"precious"
    assert str(aside) in ran.err


def test_without_a_gpu_it_says_so(tilefit) -> None:
    ran = tilefit("calibrate")
    assert ran.code == 2
    assert "no CUDA GPU" in ran.err


@pytest.fixture
def file(tmp_path: Path) -> str:
    write(made(A100), tmp_path / "shared.npz")
    return str(tmp_path / "shared.npz")


@pytest.mark.parametrize(
    "command", [("gemm", "4096", "4096", "4096"), ("curve", "gemm", "64:512:64", "4096", "4096")]
)
def test_a_named_calibration_is_used_and_named_and_says_the_gpu(tilefit, file: str, command) -> None:
    ran = tilefit(*command, "--calibration", file)
    assert ran.code == 0, ran.err
    assert "A100" in ran.out
    assert "(calibrated on 2026-01-02)" in " ".join(ran.out.split())
    assert "calibrated on" not in tilefit(*command, "--gpu", "a100").out


def test_check_takes_it(tilefit, file: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(4096, 4096), torch.empty(4096, 4096)\n"
    )
    ran = tilefit("check", "model.py:make", "--amp", "bf16", "--calibration", file)
    assert ran.code in (0, 1), ran.err
    assert "calibrated on 2026-01-02" in " ".join(ran.out.split())


def test_a_calibration_of_another_gpu_is_an_error(tilefit, file: str) -> None:
    ran = tilefit("gemm", "64", "64", "64", "--gpu", "h100", "--calibration", file)
    assert ran.code == 2
    assert f"of the GPU {A100.name}, not of h100-sxm" in ran.err


def test_a_calibration_that_is_none_is_an_error(tilefit, tmp_path: Path) -> None:
    """In words of ours: what numpy says of it is no help."""
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "script.py").write_text("x = 1")
    (tmp_path / "report.json").write_text('{"schema_version": 1}')
    for name, why in {
        "notes.txt": "it is damaged, or no calibration",
        "script.py": "it is damaged, or no calibration",
        "report.json": "it is damaged, or no calibration",
        "missing.npz": "No such file or directory",
    }.items():
        ran = tilefit("gemm", "64", "64", "64", "--gpu", "h100", "--calibration", str(tmp_path / name))
        assert ran.code == 2
        assert f"{name}: the calibration cannot be read: {why}" in ran.err


@pytest.mark.usefixtures("_a100")
def test_a_quick_one_is_then_used_by_itself(tilefit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several = {"gemm": islice(calibration.candidates()["gemm"], 60)}
    monkeypatch.setattr("tilefit.measure.quick.candidates", lambda seed: several)
    ran = tilefit("calibrate", "--quick")
    assert ran.code == 0, ran.err
    assert "multiprocessors at 0." in ran.out
    after = " ".join(tilefit("gemm", "4096", "4096", "4096", "--gpu", "a100").out.split())
    assert "quickly calibrated on 20" in after


def test_two_are_compared_and_merged(tilefit, tmp_path: Path) -> None:
    worse, better, out = (tmp_path / f"{name}.npz" for name in ("worse", "better", "out"))
    other = replace(GENERAL, math_efficiency=0.7)
    write(made(A100, 4.0, {"datasheet": 0.2, "calibrated": 0.15}), worse)
    write(made(A100, 2.0, {"datasheet": 0.2, "calibrated": 0.05}, other), better)
    table = tilefit("calibrate", "--compare", str(worse), str(better)).out
    assert "15.0 %" in table
    assert "5.0 %" in table
    assert "math efficiency" in table
    assert tilefit("calibrate", "--merge", str(worse), str(better), "--output", str(out)).code == 0
    product = Gemm(4096, 4096, 4096)
    # The better networks correct the constants that they were fitted with, not those of the other file.
    assert estimate(product, priced(A100, out)) == estimate(product, priced(A100, better))
    assert estimate(product, priced(A100, out)) != estimate(product, priced(A100, worse))
    assert estimate(replace(product, dtype="fp16"), priced(A100, out)) == estimate(
        replace(product, dtype="fp16"), priced(A100, worse)
    )


def test_what_cannot_be_merged_is_refused(tilefit, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.npz", tmp_path / "theirs.npz"
    write(made(A100), ours)
    write(made(gpus.get("h200")), theirs)
    assert "--output" in tilefit("calibrate", "--merge", str(ours), str(ours)).err
    refused = tilefit("calibrate", "--merge", str(ours), str(theirs), "--output", str(tmp_path / "out.npz"))
    assert refused.code == 2
    assert "of the same GPU" in refused.err


def test_a_newer_form_is_refused(tilefit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "newer.npz"
    with monkeypatch.context() as context:
        context.setattr("tilefit.cost.calibration.FORMAT", 99)
        write(made(A100), path)
    ran = tilefit("gemm", "64", "64", "64", "--gpu", "a100", "--calibration", str(path))
    assert ran.code == 2
    assert "newer version of tilefit" in ran.err


def test_collectives_need_a_gpu_and_another(tilefit, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tilefit("calibrate", "--collectives")
    assert ran.code == 2
    assert "no CUDA GPU" in ran.err
    names = ["NVIDIA A100-SXM4-80GB"]
    _pretend(monkeypatch, names)
    ran = tilefit("calibrate", "--collectives")
    assert ran.code == 2
    assert "need two GPUs or more, and this machine has one: NVIDIA A100" in " ".join(ran.err.split())
    names.append("NVIDIA L4")
    ran = tilefit("calibrate", "--collectives")
    assert ran.code == 2
    assert "not alike: NVIDIA A100-SXM4-80GB, NVIDIA L4" in " ".join(ran.err.split())


def _pretend(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    from tilefit.cli import local_gpu

    here = local_gpu.LocalGpu(
        HostDevice(), torch.device("cpu"), Environment(names[0], "580", "2.11", "13.0", "91900")
    )
    monkeypatch.setattr(local_gpu, "local_gpu", lambda: here)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])


def test_collectives_are_measured_and_written_beside_what_is_there(
    tilefit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On links of half the bandwidth."""
    from tilefit.cli import local_gpu
    from tilefit.measure import collectives

    slow = Fabric(A100, constants=replace(link_constants(A100), share=0.42))

    def measure(ranks: object, sizes: Sequence[int]) -> Iterator[collectives.Timed]:
        for size in sizes:
            time_s = slow.time_s("all-gather", size, Group(2, 2))
            yield collectives.Timed("all-gather", 2, size, time_s)

    monkeypatch.setattr(local_gpu, "local_gpus", lambda: ("NVIDIA A100-SXM4-80GB", 2, "cpu"))
    monkeypatch.setattr(collectives, "measure", measure)
    monkeypatch.setattr(ranks, "Ranks", lambda count, device: nullcontext())
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = tmp_path / "tilefit" / "calibrations" / f"{A100.name}.npz"
    write(made(A100), path)
    ran = tilefit("calibrate", "--collectives")
    assert ran.code == 0, ran.err
    assert "19 collectives among 2 GPUs" in ran.out
    found = read(path)
    assert found.links is not None
    assert found.links.share < 0.6
    assert "gemm" in found.networks
    assert "Calibration written to" in ran.err
