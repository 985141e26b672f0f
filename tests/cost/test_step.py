from __future__ import annotations

from dataclasses import replace

import pytest

from tilefit.cost import estimate, estimate_step
from tilefit.cost.estimate import LAUNCH
from tilefit.cost.launch import IDLE_S, around_s
from tilefit.gpus import get
from tilefit.ops import (
    FORWARD,
    OPTIMIZER,
    Conv,
    Gemm,
    Op,
    Parameter,
    Recurrent,
    Settings,
    Site,
    Step,
    StepOp,
    Streaming,
    TensorRef,
)

H200 = get("h200")
LARGE = Gemm(8192, 8192, 8192)
SMALL = Streaming("pointwise", 1024, 2048, 2048, "bf16")


def step(*ops: Op, settings: Settings | None = None) -> Step:
    return Step(tuple(StepOp(op, FORWARD, Site()) for op in ops), settings=settings or Settings())


def test_large_operations_hide_the_launches() -> None:
    many = estimate_step(step(*[LARGE] * 20, SMALL), H200)
    assert many.gpu_time_s == pytest.approx(20 * estimate(LARGE, H200).time_s + estimate(SMALL, H200).time_s)
    assert many.time_s == pytest.approx(many.gpu_time_s + 21 * IDLE_S)
    assert many.gpu_time_s > many.host_time_s > 0
    assert many.launch_share == 0


def test_small_operations_wait_for_the_host() -> None:
    few, many = (estimate_step(step(*[SMALL] * count), H200) for count in (100, 200))
    assert few.time_s == few.host_time_s
    assert few.bound_time_s[LAUNCH] > few.gpu_time_s
    # Eager PyTorch launches 30,000 to 60,000 small operations a second.
    assert 1 / 60e3 < (many.time_s - few.time_s) / 100 < 1 / 30e3


def test_a_forward_pass_alone_costs_the_host_its_launches_and_no_modules() -> None:
    def host_s(*modules: str, training: bool) -> float:
        ops = tuple(StepOp(SMALL, FORWARD, Site(name)) for name in modules)
        return estimate_step(Step(ops, settings=Settings(training=training)), H200).host_time_s

    one, three = ("first", "first", "first"), ("first", "second", "third")
    assert host_s(*three, training=False) == host_s(*one, training=False)
    assert host_s(*three, training=True) > host_s(*one, training=True) > host_s(*one, training=False)


def test_the_host_runs_ahead_into_the_next_step() -> None:
    launched = [SMALL] * 50
    large = [LARGE] * 2
    behind, first = (estimate_step(step(*ops), H200) for ops in ((*large, *launched), (*launched, *large)))
    # Wherever the GPU has its work, that hides the launches of what comes behind it, at last the next step's.
    assert behind.time_s == pytest.approx(first.time_s) == pytest.approx(first.gpu_time_s, rel=0.05)
    assert first.time_s > first.host_time_s


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
    # On an H200's host an eager LSTM in bf16 waits 10 us or more for each step's launches.
    assert 10e-6 < predicted.time_s / 256 < 20e-6
    assert estimate(layer, H200).time_s < predicted.time_s
    persistent = replace(layer, dtype="fp16")
    assert estimate_step(step(persistent), H200).time_s < predicted.time_s / 3


def layers(*settings: str, count: int = 4, parameters: int = 2) -> Step:
    """A training step of small operations: ``count`` layers of two operations each."""
    names = [f"layers.{index}" for index in range(count)]
    ops = [StepOp(SMALL, FORWARD, Site(name)) for name in names for _ in range(2)]
    ops += [StepOp(SMALL, "backward-data", Site(name)) for name in reversed(names) for _ in range(2)]
    ops += [StepOp(SMALL, OPTIMIZER, Site()) for _ in range(8)]
    weights = {f"{name}.p{index}": Parameter((8,), "fp32") for name in names for index in range(parameters)}
    return Step(tuple(ops), parameters=weights, settings=Settings(**dict.fromkeys(settings, True)))


def test_modules_and_parameters_take_time_on_the_host() -> None:
    plain = estimate_step(layers(), H200).host_time_s
    frozen = layers()
    weights = {name: replace(each, trainable=False) for name, each in frozen.parameters.items()}
    assert estimate_step(layers(parameters=4), H200).host_time_s > plain
    assert estimate_step(replace(frozen, parameters=weights), H200).host_time_s < plain
    one = tuple(replace(entry, site=Site("layers.0")) for entry in layers().ops)
    without = estimate_step(replace(layers(), ops=one), H200).host_time_s
    assert without < plain


def test_a_gradient_is_accumulated_once_when_the_backward_pass_reaches_its_module() -> None:
    ops = layers().ops
    around = [each for entry, each in zip(ops, around_s(layers()), strict=True) if "backward" in entry.phase]
    assert around[0::2] == [around[0]] * 4
    assert around[0] > 0
    assert not any(around[1::2])


@pytest.mark.parametrize("setting", ["compiled", "cuda_graph"])
def test_a_graph_runs_the_python_of_no_module(setting: str) -> None:
    graph = layers(setting)
    for entry, around in zip(graph.ops, around_s(graph), strict=True):
        assert (around > 0) == (entry.phase == OPTIMIZER)
    assert estimate_step(graph, H200).host_time_s < estimate_step(layers(), H200).host_time_s
    # Its gradients still have to get to the parameters.
    more = estimate_step(layers(setting, parameters=4), H200).host_time_s
    assert more > estimate_step(graph, H200).host_time_s


def test_a_fused_optimizer_spends_less_on_each_parameter() -> None:
    def optimizer_s(step: Step) -> float:
        return sum(s for entry, s in zip(step.ops, around_s(step), strict=True) if entry.phase == OPTIMIZER)

    assert 0 < optimizer_s(layers("fused_optimizer")) < optimizer_s(layers())


def test_an_optimizer_that_counts_no_steps_spends_less_on_each_parameter() -> None:
    def optimizer_s(name: str) -> float:
        step = layers()
        ops = [replace(entry, name=name) if entry.phase == OPTIMIZER else entry for entry in step.ops]
        return estimate_step(replace(step, ops=tuple(ops)), H200).host_time_s

    assert optimizer_s("aten._foreach_add_") < optimizer_s("aten._foreach_addcdiv_")


def test_kernels_within_a_call_take_the_host_of_compiled_code_too() -> None:
    conv = Conv(8, 64, 64, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1))
    step_s = [
        estimate_step(
            step(replace(conv, channels_last=last), settings=Settings(compiled=True)), H200
        ).host_time_s
        for last in (True, False)
    ]
    assert step_s[0] < step_s[1]  # which converts its operands and its result


def test_what_a_compiled_backward_pass_is_given_takes_the_host() -> None:
    def host_s(*numbers: int, compiled: bool = True) -> float:
        refs = tuple(TensorRef(number, (32, 32), "bf16") for number in numbers)
        ops = (
            StepOp(SMALL, FORWARD, Site(), outputs=refs[:1]),
            StepOp(SMALL, "backward-data", Site(), inputs=refs, outputs=(TensorRef(9, (32, 32), "bf16"),)),
            StepOp(SMALL, "backward-data", Site(), inputs=(TensorRef(9, (32, 32), "bf16"),)),
        )
        return estimate_step(Step(ops, settings=Settings(compiled=compiled)), H200).host_time_s

    none, one, two, three = host_s(), host_s(1), host_s(1, 2), host_s(1, 2, 3)
    assert 0 < two - one == pytest.approx(three - two)
    # What the forward pass made was saved too: the others are parameters or inputs.
    assert one - none > two - one
    assert host_s(1, 9) == pytest.approx(two)  # whatever is made in it later
    assert host_s(1, 2, compiled=False) == host_s(1, compiled=False)


@pytest.mark.parametrize("phase", [FORWARD, "backward-data"])
def test_the_first_convolution_of_a_compiled_graph_takes_the_host_more_than_the_next(phase: str) -> None:
    conv = Conv(8, 64, 64, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1), channels_last=True)

    def host_s(count: int, **replayed: bool) -> float:
        ops = [StepOp(SMALL, each, Site()) for each in (FORWARD, "backward-data")]
        ops += count * [StepOp(conv, phase, Site())]
        settings = Settings(compiled=True, **replayed)
        return estimate_step(Step(tuple(ops), settings=settings), H200).host_time_s

    none, one, two, three = (host_s(count) for count in range(4))
    assert three - two == pytest.approx(two - one)
    assert one - none > two - one
    assert host_s(1, cuda_graph=True) - host_s(0, cuda_graph=True) < one - none


def test_layers_that_are_compiled_one_by_one_take_longer() -> None:
    whole = layers("compiled")
    split = replace(whole, settings=replace(whole.settings, recompiled=4))
    more = replace(whole, settings=replace(whole.settings, recompiled=8))
    four, eight = (estimate_step(each, H200).host_time_s for each in (split, more))
    longer_s = four - estimate_step(whole, H200).host_time_s
    assert longer_s > 1e-3
    assert eight - four == pytest.approx(longer_s)


def test_an_empty_step_takes_no_time() -> None:
    assert estimate_step(Step(()), H200).time_s == 0


def test_a_gpu_may_be_named() -> None:
    assert estimate_step(step(LARGE), "h200") == estimate_step(step(LARGE), H200)
