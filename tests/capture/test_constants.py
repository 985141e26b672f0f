"""Values that depend on no input are known; all others are not, and are never guessed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from capturing import captured, rows
from tilefit.errors import CaptureError
from tilefit.ops.program import TO_GPU, WAIT


def _value(make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    read: list[Any] = []

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        read.append(make(x).tolist())
        return x.exp()

    captured(run, rows(2, 3), train=False)
    return read[0]


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda x: torch.arange(3, device=x.device) * 2, [0, 2, 4]),
        (lambda x: torch.ones_like(x, dtype=torch.bool).all(), True),
        (lambda x: x.new_full((2,), 7).sum(), 14),
        (lambda x: torch.ones(2, 2, device="cuda").tril().cumsum(1)[1], [1, 2]),
        (lambda x: torch.tensor([3, 4], device=x.device).max(), 4),
        (lambda x: torch.zeros(2, device=x.device).to(torch.int64) + x.shape[1], [3, 3]),
    ],
)
def test_what_depends_on_shapes_alone_is_known(
    make: Callable[[torch.Tensor], torch.Tensor], value: Any
) -> None:
    assert _value(make) == value


def _added_in_place(x: torch.Tensor) -> torch.Tensor:
    ones = torch.ones(3, device=x.device)
    ones += x.sum()
    return ones


def _set_in_place(x: torch.Tensor) -> torch.Tensor:
    ones = torch.ones(3, device=x.device)
    ones[0] = x.sum()
    return ones


def _filled_through_a_view(x: torch.Tensor) -> torch.Tensor:
    ones = torch.ones(3, device=x.device)
    ones[1:].copy_(x[0, 1:])
    return ones


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: torch.ones(3, device=x.device) * x,
        lambda x: torch.rand(3, device=x.device),
        lambda x: torch.zeros(3, device=x.device).uniform_(),
        lambda x: torch.full((2,), x.sum(), device=x.device),
        _added_in_place,
        _set_in_place,
        _filled_through_a_view,
    ],
)
def test_what_depends_on_an_input_or_on_chance_is_not(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(CaptureError) as caught:
        _value(make)
    assert "--on-cpu" in caught.value.hint
    assert "test_constants.py" in caught.value.where


def test_reading_a_constant_costs_nothing() -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        assert torch.ones(4, device=x.device).all()
        return x.exp()

    assert [entry.name for entry in captured(run, rows(2, 3), train=False).ops] == [
        "aten.ones", "aten.all", "aten.exp",
    ]  # fmt: skip


@pytest.mark.parametrize("last", [3, 4])
def test_a_lookup_may_name_its_arguments(last: int) -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(last + 1, device=x.device)
        return x + torch.embedding(indices=at, weight=self.places.weight).sum()

    step = partial(captured, run, rows(2, 3), parts={"places": nn.Embedding(4, 8)}, train=False)
    if last == 3:
        assert "aten.embedding" in [entry.name for entry in step().ops]
        return
    with pytest.raises(CaptureError, match=r"row 4 of places\.weight is looked up"):
        step()


@pytest.mark.parametrize("positions", [8, 9])
def test_positions_beyond_their_table_are_refused(positions: int) -> None:
    def run(self: Any, words: torch.Tensor) -> torch.Tensor:
        at = torch.arange(words.shape[1], device=words.device) + 2
        return self.words(words) + self.places(at)

    parts = {"words": nn.Embedding(4, 8), "places": nn.Embedding(10, 8)}
    words = torch.empty((2, positions), dtype=torch.int64, device="meta")
    if positions == 8:
        assert captured(run, words, parts=parts).ops
        return
    with pytest.raises(CaptureError, match=r"row 10 of places\.weight is looked up, and it has rows 0 to 9"):
        captured(run, words, parts=parts)


def _distances(self: Any, x: torch.Tensor) -> torch.Tensor:
    scale = torch.tensor([2.0, 3.0]).type_as(x)  # made on the host
    if torch.ones_like(x).all():
        x = x * scale.sum()
    return x[torch.tensor([0, 1])] + torch.tensor(4.0, device=x.device) + torch.tensor(1.0)


def test_a_model_meets_the_host_where_it_reads_values_and_copies() -> None:
    program = captured(_distances, rows(2, 3), train=False).program
    assert program is not None
    assert not program.was_run
    found = [(event.kind, event.name, event.bytes, event.blocks) for event in program.events]
    assert found == [
        (TO_GPU, "to", 8, True),
        (WAIT, "bool", 0, True),
        (TO_GPU, "to", 16, True),
        (TO_GPU, "tensor", 4, True),
    ]
    compiled = captured(_distances, rows(2, 3), train=False, compile=True).program
    assert compiled is not None
    assert [event.kind for event in compiled.events] == [WAIT]


def test_a_model_that_never_meets_the_host() -> None:
    step = captured(
        lambda self, x: x.exp() + torch.tensor(2.0) + torch.tensor([], device=x.device).sum(),
        rows(2, 3),
        train=False,
    )
    assert not step.program
