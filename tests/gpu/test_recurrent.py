"""The recurrent modules on a GPU: each backend within PyTorch's compiler, graphs, streams and autocast."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from recurrence import CELLS, tensors
from tilefit import gpus
from tilefit.cost.recurrent_times import Row, Table
from tilefit.nn import convert
from tilefit.rnn import dispatch
from tilefit.rnn.dispatch import refusal

pytestmark = pytest.mark.gpu

cells = pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
BACKENDS = ["persistent", "cudnn"]
backends = pytest.mark.parametrize("backend", BACKENDS)


def layers(cell: str, backend: str, dtype: torch.dtype = torch.float16, **options: Any) -> tuple[Any, Any]:
    """Two layers of ours and of torch's with the same weights, 64 units."""
    _, theirs, kind = CELLS[cell]
    original = theirs(64, 64, 2, device="cuda", dtype=dtype, **kind, **options)
    module = convert(theirs(64, 64, 2, device="cuda", dtype=dtype, **kind, **options), backend=backend)
    module.load_state_dict(original.state_dict())
    return module, original


def rows(steps: int = 20, batch: int = 4, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(steps, batch, 64, device="cuda", dtype=dtype)


def assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(tensors(found), tensors(expected), strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.02, atol=0.02)


def gradients(result: Any, module: nn.Module) -> list[torch.Tensor]:
    out, ends = result
    loss = out.float().square().mean() + sum(end.float().square().mean() for end in tensors(ends))
    return list(torch.autograd.grad(loss, list(module.parameters())))


@cells
@backends
@pytest.mark.parametrize("bidirectional", [False, True])
def test_compiled_graphs(cell: str, backend: str, bidirectional: bool) -> None:
    torch._dynamo.reset()
    module, original = layers(cell, backend, bidirectional=bidirectional)
    compiled = torch.compile(module, fullgraph=True)
    for steps in (20, 30):
        x = rows(steps)
        found, expected = compiled(x), original(x)
        assert_close(found, expected)
        assert_close(gradients(found, module), gradients(expected, original))
        with torch.no_grad():
            assert_close(compiled(x), original(x))


@cells
@backends
def test_calls_replayed_in_a_cuda_graph(cell: str, backend: str) -> None:
    module, original = layers(cell, backend)
    x = rows()
    with torch.no_grad():
        module(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = module(x)[0]
        for _ in range(3):
            x.copy_(rows())
            graph.replay()
            assert_close(out, original(x)[0])


@pytest.mark.parametrize(("eager", "captured"), [BACKENDS, BACKENDS[::-1]])
def test_what_is_captured_runs_by_what_is_faster_in_a_graph(
    eager: str, captured: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {eager: (1.0, 2.0), captured: (2.0, 1.0)}
    (ours, ours_captured), (theirs, theirs_captured) = times["persistent"], times["cudnn"]
    measured = Row("lstm", "fp16", 64, 4, 20, 1, True, ours, theirs, ours_captured, theirs_captured)
    h200 = gpus.get("h200")
    monkeypatch.setattr(dispatch, "gpu_of", lambda device: h200)
    monkeypatch.setattr(dispatch, "_table", lambda device: Table([measured], h200))
    monkeypatch.setattr(dispatch, "_choose", dispatch._choose.__wrapped__)
    monkeypatch.setattr(dispatch, "_warmed_up", set())
    module, original = layers("lstm", "persistent")
    module.backend = None
    x = rows()

    def run(layer: nn.Module) -> list[torch.Tensor]:
        result = layer(x)
        return [*tensors(result), *gradients(result, layer)]

    run(module)
    assert module.explain().backend == eager
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(module)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(module)
    assert module.explain().backend == captured
    x.copy_(rows())
    graph.replay()
    assert_close(found, run(original))


@cells
@backends
def test_streams_do_not_disturb_each_other(cell: str, backend: str) -> None:
    module, original = layers(cell, backend)
    xs = [rows(200) for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    outs = []
    with torch.no_grad():
        for _ in range(5):
            outs = []
            for x, stream in zip(xs, streams, strict=True):
                with torch.cuda.stream(stream):
                    outs.append(module(x)[0])
        torch.cuda.synchronize()
        for x, out in zip(xs, outs, strict=True):
            assert_close(out, original(x)[0])


@cells
@backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(cell: str, backend: str, dtype: torch.dtype) -> None:
    module, original = layers(cell, backend, torch.float32)
    x = rows(dtype=torch.float32)
    with torch.autocast("cuda", dtype):
        found, expected = module(x), original(x)
    assert found[0].dtype == dtype
    assert_close(found, expected)
    grads = gradients(found, module)
    assert {grad.dtype for grad in grads} == {torch.float32}
    assert_close(grads, gradients(expected, original))


@cells
@backends
def test_lengths(cell: str, backend: str) -> None:
    module, original = layers(cell, backend, bidirectional=True)
    reference = convert(layers(cell, backend, bidirectional=True)[1], backend="reference")
    reference.load_state_dict(original.state_dict())
    x, lengths = rows(), torch.tensor([20, 0, 7, 1], device="cuda")
    found, expected = module(x, lengths=lengths), reference(x, lengths=lengths)
    assert_close(found, expected)
    assert_close(gradients(found, module), gradients(expected, reference))


@cells
@pytest.mark.parametrize("recompute", [False, True])
def test_resets(cell: str, recompute: bool) -> None:
    module, original = layers(cell, "persistent", bidirectional=True)
    module.recompute = recompute
    reference = convert(layers(cell, "persistent", bidirectional=True)[1], backend="reference")
    reference.load_state_dict(original.state_dict())
    x, reset = rows(), torch.rand(20, 4, device="cuda") < 0.2
    found, expected = module(x, reset=reset), reference(x, reset=reset)
    assert_close(found, expected)
    assert_close(gradients(found, module), gradients(expected, reference))


@cells
def test_the_strict_mode_of_fp32_is_strict(cell: str) -> None:
    module, original = layers(cell, "reference", torch.float32)
    x = rows(dtype=torch.float32)
    allowed = torch.backends.cudnn.rnn.fp32_precision
    exact = original.double()(x.double())[0]
    try:
        torch.backends.cudnn.rnn.fp32_precision = "ieee"
        assert (module(x)[0] - exact).abs().max() < 1e-5
        assert torch.backends.cuda.matmul.fp32_precision in ("none", "ieee")
    finally:
        torch.backends.cudnn.rnn.fp32_precision = allowed


def test_the_default_runs_something() -> None:
    module, original = layers("lstm", "persistent")
    module.backend = None
    x = rows()
    assert_close(module(x), original(x))
    explanation = module.explain()
    assert explanation.backend in BACKENDS
    assert (refusal(explanation.call) is None) or explanation.backend == "cudnn"
    assert explanation.algorithm is None or explanation.algorithm.forward == "PERSIST_STATIC_SMALL_H"


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_single_step(cell: str) -> None:
    """By PyTorch's cell functions, which the GPU has kernels of its own for."""
    module, original = layers(cell, "cell", bidirectional=True)
    x = rows(1)
    found, expected = module(x), original(x)
    assert_close(found, expected)
    assert_close(gradients(found, module), gradients(expected, original))
    reference = convert(layers(cell, "cell", bidirectional=True)[1], backend="reference")
    reference.load_state_dict(original.state_dict())
    states = tuple(torch.randn(4, 4, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    hx = states if cell == "lstm" else states[0]
    reset = torch.tensor([[True, False, False, True]], device="cuda")
    assert_close(module(x, hx, reset=reset), reference(x, hx, reset=reset))
    one = torch.randn(1, 1, 64, device="cuda", dtype=torch.float64, requires_grad=True)
    module.double()
    assert torch.autograd.gradgradcheck(lambda x: module(x)[0], (one,), nondet_tol=1e-9)


@cells
@pytest.mark.parametrize("made", ["converted", "moved"])
def test_bf16_weights_lie_as_cudnn_wants_them(cell: str, made: str) -> None:
    """cuDNN's calls of torch.nn's bf16 layers copy the weights together each time, and warn."""
    ours, theirs, kind = CELLS[cell]
    original = theirs(64, 64, 2, bidirectional=True, device="cuda", dtype=torch.bfloat16, **kind)
    if made == "converted":
        module = theirs(64, 64, 2, bidirectional=True, device="cuda", dtype=torch.bfloat16, **kind)
        before = list(module.parameters())
        module = convert(module, backend="cudnn")
        assert all(one is other for one, other in zip(module.parameters(), before, strict=True))
    else:
        module = ours(64, 64, 2, bidirectional=True, backend="cudnn", **kind).bfloat16().cuda()
    module.load_state_dict(original.state_dict())
    assert len({weight.untyped_storage().data_ptr() for weight in module.parameters()}) == 1
    x = rows(dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = module(x)
        grads = gradients(found, module)
    expected = original(x)
    assert_close(found, expected)
    assert_close(grads, gradients(expected, original))
