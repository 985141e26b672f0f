"""Schedules: never below what they consist of, and in the order that pipelines have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from tilefit.parallel.schedule import (
    APART,
    ONE_F_ONE_B,
    ZERO_BUBBLE,
    ZERO_BUBBLE_V,
    Task,
    in_flight,
    order,
    place_of,
    run,
)


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
        assert max(sum(each.held) for each in in_flight(stage, stages, chunks, parts)) == most


@pytest.mark.parametrize(
    ("schedule", "name", "chunks"),
    [
        (ONE_F_ONE_B, "ScheduleInterleaved1F1B", 2),
        (ONE_F_ONE_B, "ScheduleInterleaved1F1B", 4),
        (ZERO_BUBBLE, "ScheduleInterleavedZeroBubble", 1),
        (ZERO_BUBBLE, "ScheduleInterleavedZeroBubble", 2),
        (ZERO_BUBBLE_V, "ScheduleZBVZeroBubble", 2),
    ],
)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_orders_are_those_of_pytorch(schedule: str, name: str, chunks: int, stages: int) -> None:
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
    for parts in (stages, 3 * stages, *([1, 5] if schedule == ZERO_BUBBLE_V else [])):
        theirs = SimpleNamespace(
            n_local_stages=chunks,
            microbatches_per_round=stages,
            pp_group_size=stages,
            num_stages=stages * chunks,
            _n_microbatches=parts,
        )
        for stage in range(stages):
            actions = getattr(schedules, name)._calculate_single_rank_operations(theirs, stage)
            expected = [
                (kinds[each.computation_type.name], each.microbatch_index, each.stage_index)
                for each in actions
                if each is not None
            ]
            ours = order(stage, stages, chunks, parts, schedule)
            assert [
                (kind, part, place_of(stage, chunk, stages, schedule)) for kind, part, chunk in ours
            ] == expected


def test_what_a_stage_holds_by_hand() -> None:
    # Four stages: 1F1B holds as many micro-batches as there are stages from it on; zero-bubble as many as
    # the first on each, of which those that are put off wait with their gradients.
    def fullest(stage: int, schedule: str = ONE_F_ONE_B, chunks: int = 1) -> set[tuple[int, int]]:
        return {(sum(each.held), sum(each.late)) for each in in_flight(stage, 4, chunks, 8, schedule)}

    assert [fullest(stage) for stage in range(4)] == [{(each, 0)} for each in (4, 3, 2, 1)]
    assert [max(fullest(stage, ZERO_BUBBLE)) for stage in range(4)] == [(4, late) for late in range(4)]
    for schedule in APART:
        assert max(held for stage in range(4) for held, _ in fullest(stage, schedule, 2)) == 8


def test_with_as_many_micro_batches_as_stages_a_chunk_is_done_before_the_one_before_it_begins() -> None:
    # All forward passes go ahead of the first stage's backward passes; the last alternates in its last chunk.
    first, last = ([(*each,) for each in in_flight(stage, 4, 2, 4)] for stage in (0, 3))
    none = (0, 0)
    assert first == [
        (1, (4, 4), none, (0, 0)),
        (1, (4, 3), none, (0, 1)),
        (0, (4, 0), none, (0, 2)),
        (0, (3, 0), none, (1, 2)),
    ]
    assert last == [
        (1, (4, 1), none, (0, 0)),
        (1, (4, 1), none, (0, 1)),
        (0, (4, 0), none, (0, 2)),
        (0, (3, 0), none, (1, 2)),
    ]
