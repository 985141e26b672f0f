"""Schedules: never below what they consist of, and in the order that pipelines have."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilefit.parallel.schedule import Task, in_flight, order, run


def test_two_streams_overlap_and_wait() -> None:
    # Compute: 2 then 3; communication of 4 behind the first, the last waits for both.
    tasks = [
        Task("a", ("gpu",), 2.0),
        Task("sum", ("link",), 4.0, ("a",)),
        Task("b", ("gpu",), 3.0),
        Task("end", ("gpu",), 1.0, ("sum", "b")),
    ]
    assert run(tasks) == {"a": 2.0, "b": 5.0, "sum": 6.0, "end": 7.0}


@pytest.mark.parametrize("after", [("b",), ("nothing",)])
def test_a_circle_is_an_error_and_no_hang(after: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        run([Task("a", (0,), 1.0, after), Task("b", (0,), 1.0, ("a",))])


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # a busy machine draws slowly
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(0, 10), st.lists(st.integers(0, 30), max_size=3)), max_size=30
    ),
    st.floats(1, 3),
)
def test_never_below_a_stream_or_a_chain_and_no_faster_when_work_grows(
    drawn: list[tuple[int, float, list[int]]], factor: float
) -> None:
    def tasks(scale: float) -> list[Task]:
        return [
            Task(i, (resource,), time_s * scale, tuple(each for each in after if each < i))
            for i, (resource, time_s, after) in enumerate(drawn)
        ]

    ends = run(tasks(1.0))
    whole_s = max(ends.values(), default=0.0)
    for resource in range(3):
        assert whole_s >= sum(time_s for each, time_s, _ in drawn if each == resource) - 1e-9
    for task in tasks(1.0):
        assert all(ends[task.name] >= ends[name] + task.time_s - 1e-9 for name in task.after)
    assert max(run(tasks(factor)).values(), default=0.0) >= whole_s - 1e-9


@pytest.mark.parametrize(
    ("stages", "chunks", "parts"), [(1, 1, 3), (4, 1, 8), (4, 1, 2), (4, 2, 8), (2, 4, 4)]
)
def test_every_stage_does_each_pass_once_forward_first(stages: int, chunks: int, parts: int) -> None:
    for stage in range(stages):
        done = list(order(stage, stages, chunks, parts))
        assert len(done) == len(set(done)) == 2 * parts * chunks
        held = most = 0
        for index, (kind, part, chunk) in enumerate(done):
            if kind == "B":
                assert ("F", part, chunk) in done[:index]
            held += 1 if kind == "F" else -1
            most = max(most, held)
        assert most == in_flight(stage, stages, chunks, parts) * chunks
