"""The operator is what compilers and higher derivatives need it to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from alone import alone
from recurrence import assert_same, gradients, pair, state, tensors
from tilefit.nn import LSTM
from tilefit.rnn import operator

LENGTHS = torch.tensor([3, 0, 1], dtype=torch.int32)
RESET = torch.tensor([[0, 0, 1], [0, 1, 0], [1, 0, 0]], dtype=torch.uint8)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


# Not rnn_relu: finite differences across the kink say nothing.
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("rest", [{}, {"lengths": LENGTHS, "reset": RESET}], ids=["plain", "ragged"])
def test_first_and_second_derivatives(cell: str, bidirectional: bool, rest: dict[str, torch.Tensor]) -> None:
    module, _ = pair(cell, 2, 2, bidirectional=bidirectional)
    x, hx = rows(3, 3, 2), state(module, 3)

    def run(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensors(*module(x, hx, **rest)))

    arguments = (x, *tensors(hx), *module.parameters())
    assert torch.autograd.gradcheck(run, arguments, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, arguments, fast_mode=True)


def test_a_gradient_penalty_trains() -> None:
    module, original = pair("lstm", 4, 3, 2)
    x = rows(5, 2, 4)
    for each in (module, original):
        (grad,) = torch.autograd.grad(each(x)[0].sum(), x, create_graph=True)
        grad.square().sum().backward()
    assert_same([p.grad for p in module.parameters()], [p.grad for p in original.parameters()])


@pytest.mark.parametrize(
    ("cell", "keep"),
    [("lstm", operator.ALL), ("gru", operator.STATES), ("rnn_tanh", operator.NOTHING)],
)
def test_shapes_and_registrations_hold(cell: str, keep: str) -> None:
    module, _ = pair(cell, 3, 2, bidirectional=True)
    wanted = keep != operator.NOTHING
    weights = [
        w.detach().requires_grad_(wanted)
        for w in operator.joined_weights(module._weights(), 2, torch.float64)
    ]
    h0 = rows(2, 3, 2).detach().requires_grad_(wanted)
    c0 = rows(2, 3, 2).detach().requires_grad_(wanted) if cell == "lstm" else None
    x = rows(4, 3, 3).detach()
    lengths = torch.tensor([4, 0, 2], dtype=torch.int32)
    reset = torch.zeros(4, 3, dtype=torch.uint8)
    torch.library.opcheck(
        operator._forward_operator, (x, *weights, h0, c0, lengths, reset, cell, keep, "reference")
    )


@pytest.mark.parametrize(
    ("cell", "recompute", "backend"),
    [("lstm", False, "aot_eager"), ("gru", True, "aot_eager"), ("rnn_relu", False, "eager")],
)
def test_whole_graphs_compile(cell: str, backend: str, recompute: bool) -> None:
    torch._dynamo.reset()
    module, original = pair(cell, 4, 3, 2, bidirectional=True, batch_first=True, recompute=recompute)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for steps in (5, 6, 9):
        x, hx = rows(2, steps, 4), state(module, 2)
        found, expected = (tensors(*each(x, hx)) for each in (compiled, original))
        assert_same(found, expected)
        inputs = (x, *tensors(hx))
        assert_same(
            gradients(found, [*inputs, *module.parameters()]),
            gradients(expected, [*inputs, *original.parameters()]),
        )
    lengths, reset = torch.tensor([2, 5]), torch.rand(2, 5) < 0.3
    x = rows(2, 5, 4)
    assert_same(
        tensors(*compiled(x, lengths=lengths, reset=reset)), tensors(*module(x, lengths=lengths, reset=reset))
    )


def test_flattening_the_weights_does_not_break_a_graph() -> None:
    """Models call it in their forward methods, for torch.nn.DataParallel."""
    module, _ = pair("gru", 5, 4)

    def forward(x: torch.Tensor) -> torch.Tensor:
        module.flatten_parameters()
        return module(x)[0]

    x = torch.randn(2, 3, 5, dtype=torch.float64)
    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    assert_same([compiled(x)], [forward(x)])


def test_compiled_code_that_casts() -> None:
    torch._dynamo.reset()
    module = LSTM(8, 4)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = compiled(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), module(x)[0], rtol=0, atol=0.03)


def test_exported_programs_keep_the_operator() -> None:
    module, original = pair("lstm", 4, 3)
    x = rows(5, 2, 4).detach()
    program = torch.export.export(module, (x,))
    assert "tilefit.recurrent" in str(program.graph)
    assert_same(tensors(program.module()(x)), tensors(original(x)))


def test_distributed_data_parallel() -> None:
    module, original = pair("gru", 4, 3, 2)
    with alone():
        parallel = nn.parallel.DistributedDataParallel(module)
        x = rows(5, 2, 4)
        for each in (parallel, original):
            each(x)[0].square().sum().backward()
    assert_same([p.grad for p in module.parameters()], [p.grad for p in original.parameters()])


def test_shapes_without_values() -> None:
    with FakeTensorMode():
        out, (h_n, c_n) = LSTM(8, 16, 2, bidirectional=True)(torch.empty(5, 3, 8))
    assert out.shape == (5, 3, 32)
    assert h_n.shape == c_n.shape == (4, 3, 16)


def test_memory_laid_out_in_any_way() -> None:
    module, original = pair("gru", 4, 3, 2, bidirectional=True)
    x = rows(4, 2, 6).transpose(0, 2)[1:]
    h0 = rows(3, 2, 4).permute(2, 1, 0)
    found, expected = (tensors(*each(x, h0)) for each in (module, original))
    assert_same(found, expected)
    grads = [torch.autograd.grad(out.expand(2, *out.shape).sum(), h0)[0] for out, _ in (found, expected)]
    assert_same([grads[0]], [grads[1]])


def test_sixteen_bits_are_summed_in_thirty_two() -> None:
    module, _ = pair("lstm", 64, 64)
    x = torch.randn(20, 4, 64, dtype=torch.float64)
    exact = module(x)[0]
    half = module.bfloat16()(x.bfloat16())[0]
    # Inputs and weights rounded to 8 bits cost about as much as rounding the outputs does.
    assert (half.double() - exact).abs().max() < 4 * torch.finfo(torch.bfloat16).eps


def test_changing_the_output_in_place_before_backward_is_noticed() -> None:
    module, _ = pair("gru", 4, 3)
    out, _ = module(rows(3, 2, 4))
    out.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_compiled_model_in_training_equals_an_eager_one() -> None:
    torch._dynamo.reset()
    module, original = pair("lstm", 4, 4, 2)
    losses: dict[str, list[float]] = {}
    for name, each, call in (
        ("ours", module, torch.compile(module, fullgraph=True, backend="aot_eager")),
        ("torch", original, original),
    ):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        generator = torch.Generator().manual_seed(0)
        losses[name] = []
        for _ in range(5):
            x = torch.randn(6, 3, 4, dtype=torch.float64, generator=generator)
            loss: Any = (call(x)[0] - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    assert losses["ours"] == pytest.approx(losses["torch"], rel=1e-9)
    assert losses["ours"] != pytest.approx([losses["ours"][0]] * 5, rel=1e-3)
