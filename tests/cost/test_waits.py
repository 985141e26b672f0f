"""Host and GPU, which wait for each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilefit.cost import estimate_step, fuse, step_s
from tilefit.cost.estimate import LAUNCH, WAITS
from tilefit.cost.launch import FORWARD_S, IDLE_S
from tilefit.cost.streams import Timed, run
from tilefit.cost.waits import copy_s
from tilefit.gpus import get
from tilefit.ops import FORWARD, OPTIMIZER, Gemm, Habit, HostEvent, Program, Site, Step, StepOp, Streaming
from tilefit.ops.program import TO_GPU, TO_HOST, WAIT
from tilefit.ops.scaling import scale_batch

H200, T4 = get("h200"), get("t4")
LINE = Site("", "train.py:7")
LARGE = Gemm(8192, 8192, 8192)
SMALL = Streaming("pointwise", 1024, 2048, 2048, "bf16")


def program(*events: HostEvent, **parts: object) -> Program:
    return Program("train.py", "a step", events=events, **parts)


def wait(index: int) -> HostEvent:
    return HostEvent(index, WAIT, "item", LINE)


def copy(index: int, size: int, *, pinned: bool, non_blocking: bool) -> HostEvent:
    return HostEvent(index, TO_GPU, "to", LINE, size, pinned, non_blocking)


def step(*ops: object, events: tuple[HostEvent, ...] = (), **parts: object) -> Step:
    entries = tuple(StepOp(op, FORWARD, Site()) for op in ops)
    return Step(entries, program=program(*events, **parts))


times = st.integers(0, 1000).map(lambda ms: ms / 1000)
operations = st.lists(st.tuples(times, times), min_size=1, max_size=12)
copies = st.builds(
    copy, st.integers(0, 12), st.integers(0, 10**9), pinned=st.booleans(), non_blocking=st.booleans()
)
meetings = st.lists(st.integers(0, 12).map(wait) | copies, max_size=6)


def paced(ops: list[tuple[float, float]], events: list[HostEvent]) -> float:
    launches_s, times_s = zip(*ops, strict=True)
    return run(Timed(program(*events), launches_s, times_s), H200, 1.0).time_s


def bounds(ops: list[tuple[float, float]], events: list[HostEvent]) -> tuple[float, float]:
    host_s = sum(host_s for host_s, _ in ops) + FORWARD_S * len(events)
    gpu_s = sum(gpu_s for _, gpu_s in ops) + sum(copy_s(event, H200) for event in events)
    return max(host_s, gpu_s), host_s + gpu_s


@pytest.mark.parametrize("gpu", ["h200", "t4"])
def test_the_time_alone_is_that_of_the_estimate(gpu: str) -> None:
    for events in ((), (wait(1),), (copy(1, 1 << 24, pinned=False, non_blocking=False), wait(2))):
        each = step(SMALL, LARGE, SMALL, events=events)
        assert step_s(each, gpu) == estimate_step(each, gpu).time_s


@given(operations, meetings.filter(bool))
def test_a_step_takes_the_slower_of_host_and_gpu_at_least_and_both_at_most(ops, events) -> None:
    least, most = bounds(ops, events)
    time_s = paced(ops, events)
    assert least <= time_s * (1 + 1e-9)
    assert time_s <= most * (1 + 1e-9)
    if not any(event.blocks for event in events):
        assert time_s == pytest.approx(least)


@given(operations, meetings.filter(bool), meetings)
def test_more_waits_are_never_faster(ops, events, more) -> None:
    assert paced(ops, events) <= paced(ops, events + more) * (1 + 1e-9)


@given(operations, meetings.filter(bool))
@settings(max_examples=50)
def test_it_is_the_time_of_a_step_among_others(ops, events) -> None:
    """The same clocks, over many steps one after the other, without knowing where they agree."""
    host_s = gpu_s = 0.0
    marks = [0.0]
    for _ in range(60):
        for index in range(13):
            for event in (each for each in events if each.index == index):
                host_s += FORWARD_S
                gpu_s = max(host_s, gpu_s) + copy_s(event, H200)
                host_s = gpu_s if event.blocks else host_s
            if index < len(ops):
                host_s += ops[index][0]
                gpu_s = max(host_s, gpu_s) + ops[index][1]
        marks.append(max(host_s, gpu_s))
    within = [replace(event, index=min(event.index, len(ops))) for event in events]
    ended = max(event.index for event in events) <= len(ops)
    if ended:
        assert (marks[60] - marks[30]) / 30 == pytest.approx(paced(ops, within), rel=1e-6, abs=1e-9)


def test_a_program_that_never_waits_is_priced_as_if_there_were_none() -> None:
    bare = replace(step(LARGE, *[SMALL] * 20), program=Program())
    alone, without = estimate_step(step(LARGE, *[SMALL] * 20), H200), estimate_step(bare, H200)
    assert (alone.time_s, alone.low_s, alone.high_s, alone.host_time_s) == (
        without.time_s,
        without.low_s,
        without.high_s,
        without.host_time_s,
    )
    assert alone.bound_time_s == {**without.bound_time_s, WAITS: 0.0}


def test_a_wait_at_the_end_serialises_what_was_not_launched_by_then() -> None:
    launched = [SMALL] * 100
    free, waiting = (
        estimate_step(step(*launched, LARGE, events=events), H200) for events in ((), (wait(101),))
    )
    large_s = free.ops[-1].time_s
    # Without the wait the small ones are launched while the large one runs.
    idle_s = 101 * IDLE_S
    assert free.time_s == pytest.approx(max(free.host_time_s, free.gpu_time_s + idle_s))
    assert waiting.time_s == pytest.approx(free.host_time_s + FORWARD_S + large_s, rel=0.01)
    assert waiting.bound_time_s[WAITS] == pytest.approx(
        waiting.time_s - max(free.time_s, waiting.host_time_s)
    )
    assert sum(waiting.bound_time_s.values()) == pytest.approx(waiting.time_s)
    assert waiting.low_s < waiting.time_s < waiting.high_s
    assert waiting.bound_time_s[LAUNCH] == pytest.approx(waiting.host_time_s - waiting.gpu_time_s - idle_s)


def test_a_wait_costs_little_where_the_queue_is_empty_anyway() -> None:
    free, waiting = (estimate_step(step(*[SMALL] * 100, events=events), H200) for events in ((), (wait(50),)))
    assert waiting.time_s - free.time_s < 2 * FORWARD_S


def test_a_copy_takes_as_long_as_its_slot_and_its_memory_need() -> None:
    pinned, pageable = (copy(0, 10**9, pinned=pinned, non_blocking=True) for pinned in (True, False))
    # 12 GB/s of PCIe 3.0 (NVIDIA, "CUDA C++ Best Practices Guide"), 55.4 GB/s of PCIe 5.0 (measured).
    assert copy_s(pinned, T4) == pytest.approx(1 / 12)
    assert copy_s(pinned, H200) == pytest.approx(1 / 55.4)
    assert copy_s(pinned, get("gh200-96gb")) < copy_s(pinned, H200) / 6
    assert 2 < copy_s(pageable, H200) / copy_s(pinned, H200) < 3


def test_only_a_copy_that_is_not_waited_for_lets_the_host_run_ahead() -> None:
    def time_s(*, pinned: bool, non_blocking: bool) -> float:
        event = copy(0, 1000, pinned=pinned, non_blocking=non_blocking)
        return estimate_step(step(*[SMALL] * 100, LARGE, LARGE, events=(event,)), H200).time_s

    free = time_s(pinned=True, non_blocking=True)
    blocked = {time_s(pinned=False, non_blocking=True), time_s(pinned=True, non_blocking=False)}
    assert min(blocked) > 1.1 * free
    assert max(blocked) == pytest.approx(min(blocked), rel=1e-3)


def test_a_copy_to_the_host_blocks_as_one_to_the_gpu() -> None:
    to_host = replace(copy(100, 4096, pinned=False, non_blocking=False), kind=TO_HOST)
    ops = [*[SMALL] * 99, LARGE]
    assert estimate_step(step(*ops, events=(to_host,)), H200).time_s == pytest.approx(
        estimate_step(step(*ops, events=(wait(100),)), H200).time_s, rel=1e-3
    )


def test_blocking_launches_run_one_after_the_other() -> None:
    habit = Habit("launch_blocking", LINE)
    free, blocked = (
        estimate_step(step(LARGE, *[SMALL] * 50, LARGE, habits=habits), H200) for habits in ((), (habit,))
    )
    busy_s = free.gpu_time_s + 52 * IDLE_S
    assert free.time_s == pytest.approx(max(free.host_time_s, busy_s))
    assert blocked.time_s == pytest.approx(free.host_time_s + busy_s)


def test_a_larger_batch_copies_more_but_no_more_numbers() -> None:
    events = (copy(0, 4096, pinned=False, non_blocking=False), copy(0, 4, pinned=False, non_blocking=False))
    scaled = scale_batch(replace(step(LARGE, events=(*events, wait(1))), batch=8), 3)
    assert scaled.program is not None
    assert [event.bytes for event in scaled.program.events] == [3 * 4096, 4, 0]


def test_a_compiled_step_waits_at_the_same_parts() -> None:
    phases = [FORWARD] * 6 + ["backward-data"] * 6 + [OPTIMIZER] * 2
    ops = tuple(StepOp(SMALL, phase, Site(), "aten.relu") for phase in phases)
    before = Step(ops, program=program(wait(0), wait(6), wait(12), wait(14), wait(99)))
    after = fuse(before)
    assert after.program is not None
    parts = [entry.phase.partition("-")[0] for entry in after.ops]
    ends = [index for index in range(1, len(parts)) if parts[index] != parts[index - 1]]
    assert [event.index for event in after.program.events] == [0, *ends, len(parts), len(parts)]


def test_random_numbers_that_the_host_draws_take_its_time() -> None:
    plain = estimate_step(step(*[SMALL] * 20), H200)
    drawn = estimate_step(step(*[SMALL] * 20, host_work=(("randn", 3_000_000),)), H200)
    # A core draws some 200 to 400 million a second.
    assert 3e6 / 400e6 < drawn.host_time_s - plain.host_time_s < 3e6 / 200e6
    assert drawn.bound_time_s[LAUNCH] - plain.bound_time_s[LAUNCH] == pytest.approx(
        drawn.time_s - plain.time_s
    )
    one = replace(step(SMALL, host_work=(("randn", 3_000_000),)), batch=1)
    twice = scale_batch(one, 2)
    assert twice.program is not None
    assert twice.program.host_work == (("randn", 6_000_000),)


def test_what_python_takes_goes_with_the_launches() -> None:
    """Behind a wait it holds the GPU up; at once before it, it would not."""
    waiting = step(*[SMALL] * 100, LARGE, events=(wait(0),))
    plain, slower = (estimate_step(waiting, H200, python_s=python_s).time_s for python_s in (0.0, 1e-3))
    assert slower - plain == pytest.approx(1e-3, rel=0.05)
