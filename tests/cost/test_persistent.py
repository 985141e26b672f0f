"""Recurrent layers of tilefit.nn are priced by what was measured of their kernels."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from tilefit import gpus
from tilefit.cost import estimate
from tilefit.cost.launch import launch
from tilefit.cost.recurrent_times import persistent_steps, table
from tilefit.errors import UsageError
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Recurrent, Settings, Site, StepOp

H200 = gpus.get("h200")
LAYER = Recurrent("LSTM", 1024, 1024, 256, 8, dtype="bf16", persistent="training")


def time_us(op: Recurrent) -> float:
    return estimate(op, H200).time_s * 1e6


def test_a_measured_size_takes_what_was_measured() -> None:
    measured = table(H200)
    assert measured is not None
    both = measured.persistent(LAYER, training=True, captured=True)
    forward = measured.persistent(LAYER, training=False, captured=True)
    assert both is not None
    assert forward is not None
    assert (both.hidden, both.batch, both.steps) == (1024, 8, 256)
    assert time_us(LAYER) == pytest.approx(256 * forward.time_us("persistent", True))
    passes = sum(time_us(replace(LAYER, direction=d)) for d in (FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT))
    assert passes == pytest.approx(256 * both.time_us("persistent", True))


def test_time_grows_with_steps_layers_directions_and_input() -> None:
    assert time_us(replace(LAYER, seq_len=512)) == pytest.approx(2 * time_us(LAYER))
    assert time_us(replace(LAYER, num_layers=3)) == pytest.approx(3 * time_us(LAYER))
    assert time_us(replace(LAYER, bidirectional=True)) > 1.9 * time_us(LAYER)
    assert time_us(replace(LAYER, input_size=4096)) > time_us(LAYER)


def test_cudnn_prices_what_cudnn_runs() -> None:
    """Where it was measured to be faster, beyond what was measured, and on other GPUs."""
    slower = replace(LAYER, hidden_size=2048, input_size=2048, batch=64)
    assert persistent_steps(slower, H200) is None
    assert persistent_steps(replace(slower, persistent="inference"), H200) is not None
    for op in (slower, replace(LAYER, hidden_size=8192), replace(LAYER, proj_size=64)):
        assert estimate(op, H200) == estimate(replace(op, persistent=""), H200)
    a100 = gpus.get("a100-sxm-80gb")
    assert estimate(LAYER, a100) == estimate(replace(LAYER, persistent=""), a100)


def test_the_host_launches_a_layer_not_its_steps() -> None:
    def host_s(**changed: Any) -> float:
        return launch(StepOp(replace(LAYER, **changed), FORWARD, Site()), H200, Settings()).host_s

    assert host_s(seq_len=64) == host_s(seq_len=1024) < host_s(seq_len=1024, persistent="") / 10


def test_operations_written_before_have_no_such_attributes() -> None:
    layer = replace(LAYER, persistent="")
    later = ("persistent", "rows", "dropout")
    values = [getattr(layer, each.name) for each in fields(layer) if each.name not in later]
    assert Recurrent(*values) == layer


def test_an_unknown_purpose_is_an_error() -> None:
    with pytest.raises(UsageError, match="unknown purpose 'decoding'"):
        replace(LAYER, persistent="decoding")
