from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tilefit.errors import TilefitError

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from kernels import CudaSession, HostSession, Launch, parse, split_at_markers

MARK = "void at::cuda::spin_kernel(long)"


def launches(*names: str) -> list[Launch]:
    return [Launch(name, start, 1) for start, name in enumerate(names)]


def test_each_call_gets_the_kernels_between_its_markers() -> None:
    recorded = launches(
        "setup", MARK, "gemm", "reduce", MARK, "setup", MARK, MARK, MARK, "copy", MARK, "after"
    )
    names = [[launch.name for launch in call] for call in split_at_markers(recorded, 3)]
    assert names == [["gemm", "reduce"], [], ["copy"]]


def test_lost_markers_are_an_error_not_a_wrong_assignment() -> None:
    with pytest.raises(TilefitError, match="3 of 4 markers"):
        split_at_markers(launches(MARK, "gemm", MARK, MARK, "gemm"), 2)


def test_a_failing_call_keeps_its_place() -> None:
    ticks = iter(range(0, 100, 5))
    with HostSession(clock=lambda: next(ticks)) as session:
        session.call(lambda: None)
        with pytest.raises(RuntimeError):
            session.call(_fail)
        session.call(lambda: None)
    assert [len(call) for call in session.results()] == [1, 0, 1]
    assert session.results()[0][0].duration_ns == 5


def _fail() -> None:
    raise RuntimeError("no kernel")


@pytest.mark.gpu
def test_kernels_of_a_product_are_found() -> None:
    import torch

    a = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    with CudaSession() as session:
        for _ in range(3):
            session.call(lambda: a @ a)
    calls = session.results()
    assert len(calls) == 3
    assert all(any(parse(launch.name).tile for launch in call) for call in calls)
