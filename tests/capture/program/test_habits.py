"""Habits of programs, noticed on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tilefit.capture.program.habits import Habits
from tilefit.ops import BACKWARD_DATA, FORWARD, HostEvent, Site, StepOp, Streaming
from tilefit.ops.program import WAIT


@pytest.fixture
def net() -> nn.Module:
    return nn.Linear(2, 2)


@pytest.fixture
def habits() -> Iterator[Habits]:
    numbers = iter(range(1, 1000))
    watched = Habits(lambda: f"train.py:{next(numbers)}")
    with watched.watching():
        yield watched
    torch.autograd.set_detect_anomaly(False)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def step(net: nn.Module, passes: int = 1) -> None:
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(passes):
        net(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def told(habits: Habits) -> list[tuple[str, str, str]]:
    return [(each.name, each.site.source, each.detail) for each in habits.found()]


def test_a_plain_loop_has_none(habits: Habits, net: nn.Module) -> None:
    step(net)
    step(net, passes=4)
    with torch.no_grad():
        net.eval()(torch.ones(1, 2))
    net.train()
    step(net)
    assert habits.found() == ()


def test_switches_are_told_with_their_lines(
    habits: Habits, net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.autograd.set_detect_anomaly(True)
    torch.use_deterministic_algorithms(True)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert told(habits) == [
        ("detect_anomaly", "train.py:1", ""),
        ("launch_blocking", "", ""),
        ("deterministic", "train.py:2", "torch.use_deterministic_algorithms"),
    ]
    torch.autograd.set_detect_anomaly(False)
    torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    assert told(habits) == []
    torch.backends.cudnn.deterministic = True
    assert told(habits) == [("deterministic", "", "torch.backends.cudnn.deterministic")]


def test_a_region_of_anomaly_mode_is_seen_after_it_was_left(habits: Habits, net: nn.Module) -> None:
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        step(net)
    assert [name for name, *_ in told(habits)] == ["detect_anomaly"]


def test_an_evaluation_is_one_of_which_no_backward_pass_comes(habits: Habits, net: nn.Module) -> None:
    net.eval()
    net(torch.ones(1, 2))
    net(torch.ones(1, 2))
    net.train()
    step(net)
    assert told(habits) == [
        ("evaluates_with_gradients", "train.py:1", "1 call"),
        ("evaluates_with_gradients", "train.py:2", "1 call"),
    ]
    assert told(habits) == told(habits)


def test_training_in_eval_mode_and_models_without_gradients_are_no_evaluation(
    habits: Habits, net: nn.Module
) -> None:
    step(net.eval())
    net.requires_grad_(False)
    net(torch.ones(1, 2))
    assert habits.found() == ()


class Reducing(nn.Module):
    """What of DistributedDataParallel is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.require_backward_grad_sync = True
        self.module = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def test_sums_over_ranks_are_counted_from_step_to_step(habits: Habits) -> None:
    net = Reducing()
    step(net)
    step(net)
    net.require_backward_grad_sync = False
    step(net, passes=3)
    assert habits.found() == ()
    net.require_backward_grad_sync = True
    step(net, passes=4)
    ((name, _, detail),) = told(habits)
    assert (name, detail) == ("synchronizes_micro_batches", "4 micro-batches")


def test_reads_are_named_for_why_they_are_made(net: nn.Module) -> None:
    event = HostEvent(0, WAIT, "item", Site("", "train.py:9"))
    check = StepOp(Streaming("pointwise", 4, 16, 4), BACKWARD_DATA, Site(), "aten.isnan")
    forward = StepOp(Streaming("pointwise", 4, 16, 4), FORWARD, Site(), "aten.isnan")
    ops, events = [forward, check, check], [event]
    habits = Habits(lambda: "train.py:1", lambda: (ops, events))
    scaler = torch.amp.GradScaler("cpu")

    told: list[str] = []

    class Reading(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            events.append(event)
            habits.found()  # as where the captured step ends here
            told.append(events[-1].name)

    with habits.watching():
        loss = net(torch.ones(1, 2)).sum()
        loss.register_hook(lambda gradient: events.append(event))
        scaler.scale(loss).backward()
        scaler.step(Reading(net.parameters()))
        torch.autograd.set_detect_anomaly(True)
        loss = net(torch.ones(1, 2)).sum()
        loss.register_hook(lambda gradient: events.append(event))
        loss.backward()
        found = habits.found()
        torch.autograd.set_detect_anomaly(False)
    assert told == ["found_inf"]
    assert [each.name for each in events] == ["item", "item", "found_inf", "detect_anomaly"]
    assert [(each.name, each.first, each.last) for each in found] == [
        ("detect_anomaly", 1, 2),
        ("detect_anomaly", 2, 3),
    ]
