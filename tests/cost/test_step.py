from __future__ import annotations

from dataclasses import replace

import pytest

from tilefit.cost import LAUNCH, estimate, estimate_step
from tilefit.cost.launch import FIXED_S, RECURRENT_STEP_S, launch_s
from tilefit.gpus import get
from tilefit.ops import FORWARD, Gemm, Op, Recurrent, Settings, Site, Step, StepOp, Streaming

H200 = get("h200")
LARGE = Gemm(8192, 8192, 8192)
SMALL = Streaming("pointwise", 1024, 2048, 2048, "bf16")


def step(*ops: Op, settings: Settings | None = None) -> Step:
    return Step(tuple(StepOp(op, FORWARD, Site()) for op in ops), settings=settings or Settings())


def test_large_operations_hide_the_launches() -> None:
    predicted = estimate_step(step(*[LARGE] * 20), H200)
    assert predicted.gpu_time_s == pytest.approx(20 * estimate(LARGE, H200).time_s)
    # Only what comes before the first kernel is waited for.
    first_s = FIXED_S["forward"] + launch_s(LARGE, FORWARD, H200, Settings())
    assert predicted.time_s == pytest.approx(predicted.gpu_time_s + first_s)
    assert predicted.bound_time_s[LAUNCH] == pytest.approx(first_s)


def test_small_operations_wait_for_the_host() -> None:
    predicted = estimate_step(step(*[SMALL] * 100), H200)
    launches_s = 100 * launch_s(SMALL, FORWARD, H200, Settings())
    assert predicted.host_time_s == pytest.approx(FIXED_S["forward"] + launches_s)
    assert predicted.time_s == pytest.approx(predicted.host_time_s + estimate(SMALL, H200).time_s)
    assert predicted.bound_time_s[LAUNCH] > predicted.gpu_time_s


def test_the_host_runs_ahead_during_a_long_kernel() -> None:
    behind = estimate_step(step(LARGE, *[SMALL] * 100), H200)
    first = estimate_step(step(*[SMALL] * 100, LARGE), H200)
    assert behind.time_s < first.time_s


def test_bounds_add_up_to_the_step_and_the_interval_holds_it() -> None:
    predicted = estimate_step(step(LARGE, *[SMALL] * 30, Gemm(1, 4096, 4096)), H200)
    assert sum(predicted.bound_time_s.values()) == pytest.approx(predicted.time_s)
    assert predicted.low_s <= predicted.time_s <= predicted.high_s
    assert predicted.time_s >= max(predicted.gpu_time_s, predicted.host_time_s)
    assert len(predicted.ops) == 32
    assert predicted.flop == step(LARGE, *[SMALL] * 30, Gemm(1, 4096, 4096)).flop


def test_a_standard_recurrent_layer_waits_for_a_launch_every_step() -> None:
    layer = Recurrent("LSTM", 1024, 1024, 256, 16, dtype="bf16")
    predicted = estimate_step(step(layer), H200)
    assert predicted.time_s / 256 == pytest.approx(RECURRENT_STEP_S, rel=0.2)
    assert estimate(layer, H200).time_s < predicted.time_s
    persistent = replace(layer, dtype="fp16")
    assert estimate_step(step(persistent), H200).time_s < predicted.time_s / 3


def test_a_compiled_product_is_cheaper_to_launch_and_a_backward_one_dearer() -> None:
    product = Gemm(64, 64, 64)
    backward = launch_s(product, "backward-data", H200, Settings())
    assert launch_s(product, "backward-data", H200, Settings(compiled=True)) < backward
    assert launch_s(product, FORWARD, H200, Settings()) < backward


def test_an_empty_step_takes_no_time() -> None:
    assert estimate_step(Step(()), H200).time_s == 0


def test_a_gpu_may_be_named() -> None:
    assert estimate_step(step(LARGE), "h200") == estimate_step(step(LARGE), H200)
