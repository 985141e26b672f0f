"""ALN007: sizes of recurrent layers."""

from __future__ import annotations

from builders import StepBuilder
from tilefit.cost import estimate_step
from tilefit.gpus import Gpu
from tilefit.ops import Recurrent
from tilefit.rules import get, run
from tilefit.rules.base import Context


def test_hidden_and_input_size_are_padded_with_the_layers_around(h200: Gpu) -> None:
    b = StepBuilder(batch=256)
    b.recurrent("lstm", "LSTM", 1501, 1501, 100)
    b.linear("out", 25600, 1501, 4096)
    step = b.step()
    (proposal,) = get("ALN007").check(Context(step, h200, estimate_step(step, h200)))
    assert proposal.change is not None
    assert "1501 -> 15" in proposal.fix
    for (entry,) in proposal.change.replace.values():
        if isinstance(entry.op, Recurrent):
            assert entry.op.hidden_size == entry.op.input_size
            assert entry.op.hidden_size % 8 == 0
    assert {"lstm", "out"} <= {entry.site.module for (entry,) in proposal.change.replace.values()}
    # The size is reported once: not by the linear layer's rule as well.
    assert not list(get("ALN001").check(Context(step, h200, estimate_step(step, h200))))


def test_a_multiple_of_eight_is_left_alone(h200: Gpu) -> None:
    b = StepBuilder(batch=64)
    b.recurrent("lstm", "LSTM", 1024, 1024, 100)
    assert run(b.step(), h200, select=["ALN"]) == []
