from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tilefit.errors import TilefitError
from tilefit.measure import sessions
from tilefit.measure.sessions import (
    CudaSession,
    EventSession,
    Launch,
    busy_s,
    kernel_times,
    session_kind,
    split_at_markers,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from kernels import HostSession, parse

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


def test_kernels_that_overlap_count_once_and_gaps_do_not() -> None:
    assert busy_s([Launch("a", 0, 100), Launch("b", 50, 100), Launch("c", 500, 10)]) == pytest.approx(160e-9)
    assert busy_s([]) == 0.0


def test_the_median_of_calls_on_operands_of_their_own_and_nothing_of_what_cannot_run() -> None:
    """Each call takes longer than the one before; the first is not counted."""
    took_ns = iter([5000, 10, 20, 40, 30, 50, 1, 2, 3, 4, 5, 6])
    ticks = iter([])
    built: list[int] = []

    class Ticking(HostSession):
        def call(self, operation):  # type: ignore[no-untyped-def]
            nonlocal ticks
            ticks = iter((0, next(took_ns)))
            super().call(operation)

    def factory() -> Callable[[], object]:
        built.append(1)
        return lambda: None

    def too_large() -> Callable[[], object]:
        raise TilefitError("an operand exceeds the pool")

    def unsupported() -> Callable[[], object]:
        return _fail

    session = Ticking(clock=lambda: next(ticks))
    assert kernel_times([factory, too_large, factory], session) == pytest.approx([30e-9, None, 4e-9])
    assert len(built) == 12
    took_ns = iter([1, 1, 2, 3, 4, 5, 6])
    assert kernel_times([unsupported, factory], Ticking(clock=lambda: next(ticks))) == [
        None,
        pytest.approx(4e-9),
    ]


def test_what_runs_no_kernel_has_no_time() -> None:
    assert kernel_times([lambda: lambda: None], HostSession(clock=lambda: 7)) == [None]


@pytest.mark.parametrize(
    ("seen", "kind"), [([MARK, MARK], CudaSession), ([], EventSession)], ids=["records", "none"]
)
def test_events_time_kernels_where_the_profiler_sees_none(
    monkeypatch: pytest.MonkeyPatch, seen: list[str], kind: type[object]
) -> None:
    class Recorded(HostSession):
        def results(self) -> list[list[Launch]]:
            return split_at_markers(launches(*seen), 1)

    monkeypatch.setattr(sessions, "CudaSession", Recorded)
    assert session_kind() is (Recorded if kind is CudaSession else EventSession)


def _fail() -> None:
    raise RuntimeError("no kernel")


@pytest.mark.gpu
def test_a_replayed_graph_takes_as_long_as_the_kernels_and_a_gap_each() -> None:
    import torch

    from tilefit.cost.launch import GRAPHED_S
    from tilefit.measure.microbenchmarks import instance
    from tilefit.measure.pool import Pool
    from tilefit.measure.run import pool_for, time_call
    from tilefit.measure.timer import CudaDevice
    from tilefit.ops import Gemm

    pool: Pool = pool_for(torch.device("cuda"))
    op = Gemm(512, 512, 512)
    replayed_s = time_call(op, lambda: instance(op, pool), CudaDevice()).median_s
    (time_s,) = kernel_times([lambda: instance(op, pool)], CudaSession())
    assert time_s is not None
    assert 0 < replayed_s - time_s < 5 * GRAPHED_S


@pytest.mark.gpu
@pytest.mark.parametrize("size", [256, 1024, 4096])
def test_events_say_what_the_profiler_says_of_one_kernel(size: int) -> None:
    import torch

    from tilefit.measure.microbenchmarks import instance
    from tilefit.measure.run import pool_for
    from tilefit.ops import Gemm

    pool = pool_for(torch.device("cuda"))
    factories = [lambda: instance(Gemm(size, size, size), pool)]
    (profiled_s,) = kernel_times(factories, CudaSession())
    (timed_s,) = kernel_times(factories, EventSession())
    assert profiled_s is not None
    assert timed_s == pytest.approx(profiled_s, rel=0.05, abs=2e-6)


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
