"""A step on several streams: what hides behind what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilefit.cost import estimate_step
from tilefit.cost.estimate import EXPOSED
from tilefit.cost.launch import COLLECTIVE_S, DTENSOR_S, fsdp_s
from tilefit.cost.links import TAKEN, Fabric, Group
from tilefit.cost.streams import Timed, exchange_s, fabric_of, run
from tilefit.gpus import get
from tilefit.ops import FORWARD, Exchange, Gemm, HostEvent, Program, Site, Step, StepOp
from tilefit.ops.collective import ALL_REDUCE, FUNCTIONS, SEND
from tilefit.ops.program import AWAIT, EXCHANGE, RECORD, TO_STREAM, WAIT, Ordered

H100 = get("h100-sxm")
LINE = Site("", "train.py:7")
LARGE = 1 << 28
#: A gradient's sum beside the computation: its stream waits for what made it, and is waited for at the end.
AWAY, BACK = 1, 2


def exchange(size: int = LARGE, **parts: object) -> Exchange:
    return Exchange(0, ALL_REDUCE, ALL_REDUCE, size, 8, 8, LINE, **parts)  # type: ignore[arg-type]


def program(*order: Ordered, exchanges: tuple[Exchange, ...] = (exchange(),), **parts: object) -> Program:
    facts = {"ranks": 8, "per_machine": 8, **parts}
    return Program("train.py", "a step", exchanges=exchanges, order=order, **facts)  # type: ignore[arg-type]


def beside(issued: int, awaited: int, number: int = 0) -> tuple[Ordered, ...]:
    return (
        Ordered(issued, RECORD, 0, AWAY + 10 * number),
        Ordered(issued, AWAIT, 1, AWAY + 10 * number),
        Ordered(issued, EXCHANGE, 1, number),
        Ordered(issued, RECORD, 1, BACK + 10 * number),
        Ordered(awaited, AWAIT, 0, BACK + 10 * number),
    )


def took(made: Program, times_s: list[float]) -> tuple[float, float]:
    found = run(Timed(made, [1e-6] * len(times_s), times_s), H100, 1.0)
    return found.time_s, sum(found.exposed_s)


def test_a_collective_hides_behind_what_does_not_wait_for_it() -> None:
    link_s = exchange_s(exchange(), Fabric(H100))
    assert link_s is not None
    assert 1e-4 < link_s < 1e-2
    # While it runs it takes its part of the GPU from what hides it.
    hidden = took(program(*beside(1, 3)), [1e-3, 5e-2, 1e-3])
    assert hidden == (pytest.approx(5.2e-2 + TAKEN * link_s, rel=1e-4), 0.0)
    late_s, exposed_s = took(program(*beside(3, 3)), [1e-3, 5e-2, 1e-3])
    assert exposed_s == pytest.approx(link_s, rel=1e-6)
    assert late_s == pytest.approx(5.2e-2 + link_s, rel=1e-3)
    alone_s, waited_s = took(program(Ordered(1, EXCHANGE, 0, 0)), [1e-3, 5e-2, 1e-3])
    assert (alone_s, waited_s) == (pytest.approx(late_s), pytest.approx(link_s))


def test_half_of_it_hides_behind_half_of_its_time() -> None:
    link_s = exchange_s(exchange(), Fabric(H100))
    assert link_s is not None
    _, exposed_s = took(program(*beside(1, 2)), [1e-3, link_s / 2, 1e-3])
    assert exposed_s == pytest.approx(link_s / 2 * (1 - TAKEN), rel=0.02)


def test_products_and_collectives_of_dtensors_take_the_host() -> None:
    inside = replace(exchange(1 << 12), site=Site("layers.0", "train.py:7"))
    ops = tuple(StepOp(Gemm(64, 64, 64), FORWARD, Site(f"layers.{i}.up")) for i in (0, 1, 2))
    made = [
        estimate_step(Step(ops, program=program(exchanges=(inside,), split=split)), H100).host_time_s
        for split in ((), ("layers.0.up",), ("layers.0.up", "layers.1.up"))
    ]
    assert made[1] - made[0] == pytest.approx(2 * DTENSOR_S)
    assert made[2] - made[0] == pytest.approx(3 * DTENSOR_S)


def test_collectives_of_fully_shard_take_the_host() -> None:
    ops = (StepOp(Gemm(64, 64, 64), FORWARD, Site("layers.0")),)
    plain, copied = (
        estimate_step(Step(ops, program=program(exchanges=(exchange(1 << 12, copied=each),))), H100)
        for each in (False, True)
    )
    assert copied.host_time_s - plain.host_time_s == pytest.approx(fsdp_s())


def test_collectives_of_a_group_follow_each_other_and_those_of_two_do_not() -> None:
    order = (*beside(0, 1), *(replace(each, stream=each.stream * 2) for each in beside(0, 1, 1)))
    same = program(*order, exchanges=(exchange(group="0"), exchange(group="0")))
    apart = program(*order, exchanges=(exchange(group="0"), exchange(group="1")))
    one = took(program(*beside(0, 1)), [1e-4])[1]
    assert took(same, [1e-4])[1] == pytest.approx(2 * one + 1e-4, rel=0.01)
    assert took(apart, [1e-4])[1] == pytest.approx(one, rel=0.05)


def test_thousands_of_collectives_in_a_row_are_waited_for_at_once() -> None:
    count = 3000
    order = (
        *(Ordered(1, EXCHANGE, 1, number) for number in range(count)),
        Ordered(1, RECORD, 1, BACK),
        Ordered(1, AWAIT, 0, BACK),
    )
    made = program(*order, exchanges=(exchange(),) * count)
    link_s = exchange_s(exchange(), Fabric(H100))
    assert link_s is not None
    assert took(made, [1e-3] * 2)[1] == pytest.approx(count * link_s, rel=0.01)


def test_what_is_copied_on_another_stream_is_beside() -> None:
    order = (Ordered(1, TO_STREAM, 3), Ordered(2, TO_STREAM, 0))
    found = run(Timed(program(*order, exchanges=()), [1e-6] * 3, [1e-2, 5e-3, 1e-2]), H100, 1.0)
    assert found.time_s == pytest.approx(2e-2)
    assert found.aside == [1]


def test_a_host_that_reads_a_sum_waits_for_it() -> None:
    """Of a small model the host alone sets the pace, unless it waits."""
    order = (Ordered(2, EXCHANGE, 0, 0),)
    free = run(Timed(program(*order), [1e-2] * 2, [1e-3] * 2), H100, 1.0).time_s
    events = (HostEvent(2, WAIT, "item", LINE),)
    read = run(Timed(program(*order, events=events), [1e-2] * 2, [1e-3] * 2), H100, 1.0).time_s
    assert free == pytest.approx(2e-2 + COLLECTIVE_S)
    assert read > free + 1e-3


def test_a_host_that_waits_for_an_event_waits_for_what_was_before_it() -> None:
    """Such as what keeps gathered parameters from being more than two at once."""
    order = (Ordered(1, RECORD, 0, 7), Ordered(2, EXCHANGE, 1, 0))
    times_s = [1e-3, 5e-2, 1e-3]

    def waits(**where: int) -> float:
        events = (HostEvent(2, WAIT, "synchronize", LINE, **where),)
        timed = Timed(program(*order, events=events), [2e-2] * 3, times_s)
        return run(timed, H100, 1.0).time_s

    host_s = 6e-2
    assert waits(event=7) == pytest.approx(host_s, rel=0.01)  # it is over when the host gets there
    assert waits() > host_s + 1e-2
    # That of the step before is over as well.
    assert waits(event=6) == pytest.approx(host_s, rel=0.01)


def test_a_host_that_waits_for_the_end_of_the_step_before_is_not_ahead() -> None:
    order = (Ordered(2, RECORD, 0, 7),)
    events = (HostEvent(0, WAIT, "earlier event", LINE, event=6, after=0),)
    limited = Timed(program(*order, exchanges=(), events=events), [1e-3, 1e-3], [6e-3, 6e-3])
    # The first launch comes when the GPU is done with the step before.
    assert run(limited, H100, 1.0).time_s == pytest.approx(1.2e-2 + 1e-3, rel=0.02)


def stage(rank: int, *moves: tuple[int, str], size: int = 1 << 23) -> Program:
    """A rank that exchanges messages: before which operation, and who with whom, such as ``0>1``."""
    exchanges = tuple(
        replace(exchange(size, group=way), function=SEND, name=SEND, ranks=2, per_machine=2)
        for _, way in moves
    )
    order = [
        each
        for number, (index, way) in enumerate(moves)
        # Who receives waits; who sends does not.
        for each in beside(index, index if way.endswith(str(rank)) else 99, number)
    ]
    order = [replace(each, stream=5 + int(moves[0][1][0])) if each.stream else each for each in order]
    return program(*sorted(order, key=lambda e: e.index), exchanges=exchanges, rank=rank, ranks=2)


def test_a_stage_waits_for_the_other_one_to_be_there() -> None:
    """Forward 1 ms, the other one's 3 ms forward and backward, backward 2 ms."""
    message_s = exchange_s(stage(0, (1, "0>1")).exchanges[0], Fabric(H100))
    assert message_s is not None
    first = Timed(stage(0, (1, "0>1"), (1, "1>0")), [1e-7] * 2, [1e-3, 2e-3])
    second = Timed(stage(1, (0, "0>1"), (1, "1>0")), [1e-7], [3e-3])
    found = run(first, H100, 1.0, [second])
    assert found.time_s == pytest.approx(6e-3 + 2 * message_s, rel=0.01)
    assert sum(found.late_s) == pytest.approx(3e-3 + message_s, rel=0.01)
    assert sum(found.exposed_s) - sum(found.late_s) == pytest.approx(message_s, rel=0.01)
    assert (found.busy_s, found.unmet) == ((3e-3, 3e-3), 0)
    alone = run(first, H100, 1.0)  # nobody knows when the other one is there
    assert alone.time_s < 4e-3
    assert sum(alone.late_s) == 0


def test_messages_that_do_not_fit_end_nothing() -> None:
    first = Timed(stage(0, (1, "0>1"), (1, "1>0")), [1e-7] * 2, [1e-3, 2e-3])
    second = Timed(stage(1, (0, "0>1")), [1e-7], [3e-3])
    both_wait = Timed(stage(1, (0, "0>1"), (0, "1>0"), (0, "1>0")), [1e-7], [3e-3])
    assert run(first, H100, 1.0, [second]).unmet == 0  # it is sent by nobody that was run
    found = run(first, H100, 1.0, [both_wait])
    assert found.unmet > 0
    assert found.time_s > 3e-3


def test_the_bounds_of_a_step_add_up_and_name_communication() -> None:
    ops = tuple(StepOp(Gemm(4096, 4096, 4096), FORWARD, Site()) for _ in range(4))
    plain = estimate_step(Step(ops), H100)
    shared = estimate_step(Step(ops, program=program(*beside(4, 4))), H100)
    assert shared.bound_time_s[EXPOSED] == pytest.approx(shared.time_s - plain.time_s, rel=0.1)
    assert sum(shared.bound_time_s.values()) == pytest.approx(shared.time_s)
    assert shared.low_s < shared.time_s < shared.high_s


@pytest.mark.parametrize("function", FUNCTIONS)
def test_collectives_cost_what_their_links_do(function: str) -> None:
    several = program(ranks=16, per_machine=8, network="efa")
    fabric = fabric_of(several, H100)
    one = replace(exchange(), function=function, ranks=16, per_machine=8)
    assert exchange_s(one, fabric) == fabric.time_s(function, LARGE, Group(16, 8))
    assert exchange_s(one, fabric_of(replace(several, network=""), H100)) is None
