"""CUDA graphs: only where they can be exact, and never in the way. What needs a GPU is in tests/gpu."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilefit
from tilefit.capture.torchvision_import import tolerated
from tilefit.fixes import strip
from tilefit.fixes.changes.behaviour import behaviours
from tilefit.fixes.changes.fix import RefusedError
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds.cuda_graph import (
    GRAPH,
    _aside,
    _capture,
    _none,
    _Replay,
    _switches,
    as_it_is,
)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 31), nn.BatchNorm1d(31), nn.ReLU(), nn.Linear(31, 5))


def graphed(model: nn.Module) -> nn.Module:
    GRAPH.apply(Run(model))
    return model


class Own(nn.Module):
    """A module with Python of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


def hooked() -> nn.Module:
    model = network()
    model[0].register_forward_hook(lambda module, args, output: None)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Own, "Python"),
        (lambda: nn.Sequential(nn.Linear(4, 4), Own()), "1 is a .*Own"),
        (hooked, "0 has hooks"),
        (lambda: nn.Sequential(nn.SyncBatchNorm(4)), "SyncBatchNorm"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "Parametrized"),
    ],
)
def test_refusals(make: Callable[[], nn.Module], reason: str) -> None:
    model = make()
    kind = type(model)
    with pytest.raises(RefusedError, match=reason):
        graphed(model)
    assert type(model) is kind


def test_a_model_on_the_cpu_is_priced_too() -> None:
    """A capture says of its tensors that they are on a GPU, where the call would be replayed."""
    x = torch.randn(8, 13)
    plans = [
        tilefit.optimize(network(), x, gpu="h200", select=["cuda-graph"], verify=False, on_cpu=on_cpu)
        for on_cpu in (False, True)
    ]
    assert [fix.name for plan in plans for fix in plan.fixes] == ["cuda-graph"] * 2


def test_models_of_libraries_are_known_but_not_those_that_look_for_objects() -> None:
    with tolerated():
        models = pytest.importorskip("torchvision.models", exc_type=ImportError)
    assert graphed(models.mobilenet_v3_small()).state_dict()
    with pytest.raises(RefusedError, match="detection"):
        graphed(models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None))


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.LSTM(4, 4), nn.Bilinear(4, 4, 4)], ids=repr)
def test_what_is_captured_has_leaves_of_its_own(layer: nn.Module) -> None:
    kept = dict(layer.named_parameters())
    x = torch.randn(3, 4)
    with _aside(layer) as leaves:
        output = layer(x, x) if isinstance(layer, nn.Bilinear) else layer(x)
        (output[0] if isinstance(output, tuple) else output).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter is kept[name]
        assert parameter.grad is None
        assert leaves[parameter].grad is not None
        assert leaves[parameter].data_ptr() == parameter.data_ptr()


def test_a_call_is_another_where_products_run_in_another_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    before, matmul = _switches(), torch.backends.cuda.matmul
    matmul.fp32_precision = "tf32"  # after which older switches cannot be read
    try:
        assert _switches() != before
    finally:
        matmul.fp32_precision = "none"
    assert _switches() == before
    torch.set_float32_matmul_precision("high")
    try:
        assert _switches() != before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_call_is_another_where_other_kernels_may_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    before = _switches()
    with sdpa_kernel(SDPBackend.MATH):
        assert _switches() != before
    with torch.backends.cudnn.flags(enabled=False):
        assert _switches() != before
    assert _switches() == before


def test_what_was_hooked_or_replaced_later_is_not_captured() -> None:
    for later in (hook, lambda model: setattr(model[2], "forward", torch.sigmoid), python_of_ones_own):
        model = graphed(network())
        later(model)
        with pytest.warns(UserWarning, match="cannot be captured"):
            assert _capture(model, model.forward, (torch.ones(3, 13),), {}) is None


@pytest.mark.parametrize("another", [False, True])
def test_a_second_backward_pass_through_one_call_is_an_error(another: bool) -> None:
    graph = SimpleNamespace(replay=lambda: None)
    captured = SimpleNamespace(
        inputs=[torch.zeros(4)],
        forward_graph=graph,
        backward_graph=graph,
        outputs=[torch.ones(3)],
        differentiable=[True],
        gradients=[torch.ones(2)],
        given=[torch.ones(3)],
        node=_none,
    )
    weight = torch.ones(2, requires_grad=True)
    (output,) = _Replay.apply(captured, [torch.ones(4)], weight)
    assert torch.equal(captured.inputs[0], torch.ones(4))
    output.sum().backward(retain_graph=True)
    torch.testing.assert_close(weight.grad, torch.ones(2))
    if another:
        (_other,) = _Replay.apply(captured, [torch.ones(4)], weight)
    with pytest.raises(RuntimeError, match="second backward pass"):
        output.sum().backward()


def test_on_the_cpu_nothing_changes() -> None:
    original, x = network(), torch.randn(7, 13)
    model = graphed(copy.deepcopy(original))
    for _ in range(5):
        torch.testing.assert_close(model(x), original(x))
    result = tilefit.verify(original, model, x)
    assert result.ok, result
    compiled = torch.compile(model.eval(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), original.eval()(x))


def test_copies() -> None:
    model = graphed(network())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
    assert model.state_dict().keys() == network().state_dict().keys()


def test_a_model_is_graphed_once() -> None:
    with pytest.raises(RefusedError, match="before"):
        graphed(graphed(network()))


def test_undo() -> None:
    model = network()
    run = Run(model)
    edits = GRAPH.apply(run)
    assert run.cuda_graph
    edits.undo()
    assert not run.cuda_graph
    assert type(model) is nn.Sequential


def test_what_was_captured_goes_with_the_fix() -> None:
    model = network()
    edits = GRAPH.apply(Run(model))
    (behaviour,) = behaviours(model)
    behaviour._modes = as_it_is(model)
    alive = weakref.ref(behaviour)
    del behaviour
    gc.disable()
    try:
        edits.undo()
        assert alive() is None
    finally:
        gc.enable()


def freeze(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(False)


def exchange(model: nn.Sequential) -> None:
    model[3].bias = nn.Parameter(torch.zeros(5))


def reallocate(model: nn.Sequential) -> None:
    model[0].weight.data = model[0].weight.data.clone()


def replace_layer(model: nn.Sequential) -> None:
    model[2] = nn.ReLU()


def python_of_ones_own(model: nn.Sequential) -> None:
    model[2] = Own()


def hook(model: nn.Sequential) -> None:
    model[2].register_forward_pre_hook(lambda module, args: None)


def same(model: nn.Module) -> Callable[[], bool]:
    """Whether a captured call of a model may be repeated: it is as it was, in the modes it was in."""
    modes = as_it_is(model)
    then = modes()
    return lambda: then is not None and modes() == then


@pytest.mark.parametrize(
    "change",
    [
        *(freeze, exchange, reallocate, replace_layer, hook),
        lambda m: m.eval(),
        lambda m: m[1].eval(),
        lambda m: setattr(m[1], "momentum", 0.5),
        lambda m: setattr(m[0], "__class__", nn.Bilinear),
    ],
)
def test_what_was_captured_is_not_used_when_the_model_changes(
    change: Callable[[nn.Sequential], object],
) -> None:
    model = network()
    is_as_it_was = same(model)
    with torch.no_grad():  # a step of training is no such change
        model(torch.randn(7, 13))
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert is_as_it_was()
    change(model)
    assert not is_as_it_was()


def test_the_plan_uses_it_where_the_host_is_too_slow() -> None:
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())))
    plan = tilefit.optimize(model, torch.empty(32, 64), gpu="h200", select=["cuda-graph"])
    (fix,) = plan.fixes
    assert fix.gain_s > 0
    assert plan.run.cuda_graph


def test_a_busy_gpu_needs_no_graph() -> None:
    model = nn.Sequential(nn.Linear(8192, 8192), nn.ReLU(), nn.Linear(8192, 8192))
    plan = tilefit.optimize(model, torch.empty(65536, 8192), gpu="h200", select=["cuda-graph"], verify=False)
    assert not plan.fixes
    assert not plan.refused


def test_python_of_ones_own_is_a_reason() -> None:
    plan = tilefit.optimize(Own(), torch.empty(2, 4), gpu="h200", select=["cuda-graph"])
    assert not plan.fixes
    assert "Own" in plan.refused[0].reason


def _freeze(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(False)


def _add_a_layer(model: nn.Sequential) -> None:
    model.append(nn.ReLU())


LATER: list[Callable[[nn.Sequential], object]] = [
    _freeze,
    _add_a_layer,
    lambda model: model[1].eval(),
    lambda model: setattr(model[1], "eps", 0.5),
    lambda model: setattr(model[2], "forward", torch.sigmoid),
    lambda model: setattr(model[2], "__class__", nn.Sigmoid),
    lambda model: model[2].register_forward_hook(lambda module, args, output: None),
    lambda model: model.register_forward_hook(lambda module, args, output: None),
    lambda model: model.half(),
    lambda model: strip(model),
]


@pytest.mark.parametrize("later", LATER)
def test_a_state_is_another_after_a_change(later: Callable[[nn.Sequential], object]) -> None:
    model = graphed(network())
    is_as_it_was = same(model)
    assert is_as_it_was()
    later(model)
    assert not is_as_it_was()


def test_a_state_is_another_where_a_function_was_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = as_it_is(model := graphed(network()))
    relu = F.relu
    monkeypatch.setattr(F, "relu", lambda x, inplace=False: relu(x) * 2)
    assert modes() is None
    assert as_it_is(model)() is None
    assert isinstance(model, nn.Sequential)
