"""Recurrent layers; times against an H200 (PyTorch 2.11, cuDNN 9.19)."""

from __future__ import annotations

import dataclasses
import json
import statistics
from typing import Any

import pytest

from tilefit.cost import estimate, recurrent, recurrent_times
from tilefit.cost.constants import constants
from tilefit.cost.cudnn import cudnn_algorithm
from tilefit.gpus import get
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Recurrent

PERSISTS: dict[str, Any] = {
    "mode": "LSTM",
    "input_size": 1024,
    "hidden_size": 1024,
    "seq_len": 256,
    "batch": 16,
    "dtype": "fp16",
}


def layer(**changes: Any) -> Recurrent:
    return Recurrent(**(PERSISTS | changes))


@pytest.mark.parametrize("gpu", ["h200", "a100", "v100"])
def test_an_fp16_lstm_that_meets_every_condition_persists(gpu: str) -> None:
    assert cudnn_algorithm(layer(), get(gpu)) == ("PERSIST_STATIC", "")


@pytest.mark.parametrize(
    ("gpu", "changes", "failed"),
    [
        ("h200", {"dtype": "bf16"}, "bf16"),
        ("h200", {"dtype": "fp32"}, "fp32"),
        ("h200", {"proj_size": 256}, "projection"),
        ("h200", {"packed": True}, "PackedSequence"),
        ("h200", {"num_layers": 2}, "2 layers"),
        ("h200", {"bidirectional": True}, "two directions"),
        ("h200", {"hidden_size": 1152}, "1152 exceeds 1024"),
        ("h200", {"hidden_size": 1000}, "1000 is not a multiple of 128"),
        ("h200", {"input_size": 80}, "input size 80"),
        ("h200", {"mode": "GRU"}, "GRU"),
        ("h200", {"batch": 4}, "batch 4 is not a multiple of 8"),
        ("h200", {"batch": 136}, "exceeds 128"),
        ("h200", {"mode": "RNN_TANH", "batch": 128}, "batch below 96 or hidden below 896"),
        ("a30", {}, "SMs"),
        ("rtx-3090", {}, "SMs"),
        ("t4", {}, "Turing"),
        ("v100", {"batch": 80}, "80"),
        ("v100", {"batch": 24}, "24"),
        ("v100", {"seq_len": 9}, "9 steps"),
        ("v100", {"batch": 128, "seq_len": 20}, "20 steps"),
    ],
)
def test_the_first_condition_that_fails_is_named(gpu: str, changes: dict[str, Any], failed: str) -> None:
    name, reason = cudnn_algorithm(layer(**changes), get(gpu))
    assert name == "STANDARD"
    assert failed in reason
    assert reason in estimate(layer(**changes), gpu).reason


def test_small_hidden_sizes_choose_forward_and_backward_apart() -> None:
    forward = layer(hidden_size=192)
    backward = layer(hidden_size=192, direction=BACKWARD_DATA)
    assert cudnn_algorithm(forward, get("h200"))[0] == "PERSIST_STATIC_SMALL_H"
    assert cudnn_algorithm(backward, get("h200"))[0] == "STANDARD"
    vanilla = layer(mode="RNN_TANH", hidden_size=384, dtype="fp32", batch=3)
    assert cudnn_algorithm(vanilla, get("h200"))[0] == "PERSIST_STATIC_SMALL_H"
    assert cudnn_algorithm(layer(mode="RNN_TANH", hidden_size=385), get("h200"))[0] == "STANDARD"


@pytest.mark.parametrize(
    ("changes", "us_per_step"),
    [
        ({}, 2.29),
        ({"batch": 64}, 8.30),
        ({"hidden_size": 512, "input_size": 512, "batch": 32}, 3.64),
        ({"mode": "RNN_TANH"}, 3.79),
    ],
)
def test_persistent_steps_take_what_was_measured(changes: dict[str, Any], us_per_step: float) -> None:
    assert estimate(layer(**changes), "h200").time_s / 256 == pytest.approx(us_per_step * 1e-6, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "us_per_step"),
    [
        # CUDA-graph replay, so without the host: two kernels per step.
        ({"dtype": "bf16", "batch": 1}, 6.73),
        ({"dtype": "bf16", "batch": 64}, 8.63),
        ({"dtype": "bf16", "hidden_size": 256, "input_size": 256}, 5.46),
        ({"dtype": "bf16", "hidden_size": 2048, "input_size": 2048}, 11.26),
        ({"mode": "GRU"}, 7.49),
    ],
)
def test_standard_steps_take_about_what_was_measured(changes: dict[str, Any], us_per_step: float) -> None:
    predicted = estimate(layer(**changes), "h200")
    assert predicted.low_s / 256 <= us_per_step * 1e-6 <= predicted.high_s / 256


@pytest.mark.parametrize(
    ("size", "forward_us", "backward_us"),
    [
        ({"mode": "LSTM", "input_size": 512, "hidden_size": 512, "num_layers": 2, "batch": 40}, 622, 1527),
        ({"mode": "GRU", "input_size": 512, "hidden_size": 512, "batch": 40}, 261, 626),
        ({"mode": "LSTM", "input_size": 200, "hidden_size": 200, "num_layers": 2, "batch": 20}, 486, 955),
    ],
)
def test_fp32_layers_of_programs_take_about_what_an_h100_took(
    size: dict[str, Any], forward_us: float, backward_us: float
) -> None:
    """Of 35 time steps, products in TF32; what was measured is of an H200."""
    op = Recurrent(seq_len=35, dtype="tf32", **size)
    forward, *backward = (
        estimate(layer, "h100-sxm").time_s
        for layer in (
            op,
            dataclasses.replace(op, direction=BACKWARD_DATA),
            dataclasses.replace(op, direction=BACKWARD_WEIGHT),
        )
    )
    assert forward == pytest.approx(forward_us * 1e-6, rel=0.15)
    assert sum(backward) == pytest.approx(backward_us * 1e-6, rel=0.15)


@pytest.mark.parametrize(("hidden", "us_per_step"), [(32, 0.42), (64, 0.54), (128, 2.22)])
def test_few_hidden_units_stay_in_one_multiprocessor(hidden: int, us_per_step: float) -> None:
    """Weights of 256 KiB no longer fit its registers; the size itself and its mini-batch were measured."""
    op = Recurrent("LSTM", hidden, hidden, 200, 20, dtype="tf32")
    assert estimate(op, "h200").time_s / 200 == pytest.approx(us_per_step * 1e-6, rel=0.2)


def test_one_step_off_the_persistent_rules_costs_several_times_as_much() -> None:
    assert estimate(layer(batch=12), "h200").time_s > 2 * estimate(layer(batch=16), "h200").time_s


def test_backward_takes_longer_than_forward_and_the_weights_are_one_product() -> None:
    forward = estimate(layer(), "h200").time_s
    data = estimate(layer(direction=BACKWARD_DATA), "h200").time_s
    weights = estimate(layer(direction=BACKWARD_WEIGHT), "h200").time_s
    assert data > forward > weights
    # Measured forward and backward together: 8.07 us a step.
    assert (forward + data + weights) / 256 == pytest.approx(8.07e-6, rel=0.1)


def test_sizes_measured_correct_a_size_left_out() -> None:
    """What was measured of other sizes prices a size within a tenth, half as far off as computed alone."""
    path = recurrent_times.DATA / "h200.json"
    columns = json.loads(path.read_text())["columns"]
    rows = [recurrent_times.Row(*row) for row in zip(*columns.values(), strict=True)]
    forward = [row for row in rows if row.cudnn_captured_us and not row.training]
    corrected, computed = [], []
    for row in forward[::20]:
        size = (row.hidden, row.batch, row.steps)
        others = recurrent_times.Table(
            [other for other in rows if (other.hidden, other.batch, other.steps) != size], get("h200")
        )
        op = Recurrent(
            row.cell.upper(), row.hidden, row.hidden, row.steps, row.batch, dtype=row.dtype, direction=FORWARD
        )

        def time_us(op: Recurrent = op) -> float:
            estimate = recurrent.estimate_recurrent(op, get("h200"), constants(get("h200")))
            return estimate.time_s * 1e6 / op.seq_len

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recurrent, "table", lambda _gpu, others=others: others)
            recurrent._measured_over_computed.cache_clear()
            corrected.append(time_us() / row.cudnn_captured_us)
            patch.setattr(recurrent, "table", lambda _gpu: None)
            recurrent._measured_over_computed.cache_clear()
            computed.append(time_us() / row.cudnn_captured_us)
    recurrent._measured_over_computed.cache_clear()
    off = [statistics.median(abs(ratio - 1) for ratio in ratios) for ratios in (corrected, computed)]
    assert off[0] < 0.1
    assert off[0] < 0.7 * off[1]
