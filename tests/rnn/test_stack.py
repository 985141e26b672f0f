"""A stack in eager code: few operations a call, nothing in vain, and what autograd expects of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile
from torch.utils.checkpoint import checkpoint

from recurrence import CELLS, assert_same, dense, dense_grads, gradients, pair, state, tensors
from tilefit.nn import GRU, LSTM, convert
from tilefit.rnn import dispatch, passes, products, reference
from tilefit.rnn.cells import Grads, Rows


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Stand-ins of the persistent kernels, which may run everything; the list of their launches."""
    launches: list[str] = []

    def forward(cell: Any, xg: Any, w_hh: Any, bias_n: Any, rows: Rows, *, save: bool) -> Any:
        _, batch, directions, columns = xg.shape
        assert w_hh.shape == (directions, columns, columns // cell.gates)
        launches.append("forward, saves" if save else "forward")
        return reference.forward(cell, xg, w_hh, bias_n, dense(rows, w_hh, batch, cell), save=save)

    def backward(cell: Any, grads: Grads, results: Any, w_hh: Any, rows: Rows) -> Any:
        launches.append("backward")
        rows = dense(rows, w_hh, results[0].shape[1], cell)
        return reference.backward(cell, dense_grads(grads, results[0], rows), results, w_hh, rows)

    stand_ins = SimpleNamespace(forward=forward, backward=backward)
    monkeypatch.setattr(passes, "persistent", lambda: stand_ins)
    monkeypatch.setitem(dispatch._REFUSALS, "persistent", lambda call: None)
    dispatch._choose.cache_clear()
    yield launches
    dispatch._choose.cache_clear()


def operations(run: Callable[[], object]) -> Counter[str]:
    """How often each operation is called, but for those that other operations call."""
    run()
    with profile() as recorded:
        run()
    called = [event for event in recorded.function_events if event.name.startswith("aten::")]
    return Counter(
        event.name.removeprefix("aten::")
        for event in called
        if event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::")
    )


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("inputs", "hidden"), [(4, 6), (5, 3), (5, 4), (4, 5), (1, 3)])
def test_padded_sizes_compute_the_same(
    cell: str, bias: bool, bidirectional: bool, inputs: int, hidden: int, kernels: list[str]
) -> None:
    """In fp64 rows of whole 16-byte pieces are of an even number of elements."""
    module, original = pair(
        cell, inputs, hidden, 2, bias=bias, bidirectional=bidirectional, backend="persistent"
    )
    x, hx = rows(4, 3, inputs), state(original, 3)
    found, expected = (tensors(*each(x, hx)) for each in (module, original))
    assert_same(found, expected)
    given = [x, *tensors(hx)]
    assert_same(
        gradients(found, [*given, *module.parameters()]),
        gradients(expected, [*given, *original.parameters()]),
    )
    assert kernels == ["forward, saves"] * 2 + ["backward"] * 2


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("hidden", [3, 8])
def test_one_feature_takes_no_product_of_matrices(hidden: int) -> None:
    """On a GPU these may round to TF32, where cuDNN does not."""
    module = convert(torch.nn.RNN(1, hidden), backend="persistent")
    x = torch.randn(4, 2, 1, requires_grad=True)
    forward = operations(lambda: module(x))
    assert (forward["linear"], forward["addcmul"]) == (0, 1)
    out = module(x)[0].sum()
    backward = operations(lambda: torch.autograd.grad(out, [x, *module.parameters()], retain_graph=True))
    assert (backward["mv"], backward["mm"]) == (2, 1)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_call_makes_few_operations(cell: str) -> None:
    layers = 3
    ours, theirs, _ = CELLS[cell]
    module = convert(theirs(8, 16, layers), backend="persistent")
    assert isinstance(module, ours)
    x = torch.randn(4, 2, 8)
    # Counted are operations that the stand-ins of the kernels do not call.
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        forward = operations(lambda: module(x))
    assert forward["linear"] == layers
    assert forward["_foreach_copy_"] == 1
    parameters = list(module.parameters())

    def both() -> object:
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)[0]
        return torch.autograd.grad(out.sum(), parameters)

    training = operations(both)
    assert training["_foreach_copy_"] == 2
    assert training["linear"] == layers
    # Of each layer: the weights' gradients and, but for the first, the input's.
    assert training["mm"] == 3 * layers - 1
    # Of each layer the sum of the biases' gradient; one more is that of the loss.
    assert training["sum"] == layers + 1
    assert training["clone"] == 0


def test_a_kernel_is_launched_once_a_layer_and_pass(kernels: list[str]) -> None:
    module, _ = pair("lstm", 4, 4, 3, bidirectional=True, backend="persistent")
    x = rows(5, 2, 4).detach()
    with torch.no_grad():
        module(x)
    assert kernels == ["forward"] * 3
    kernels.clear()
    module(x)[0].sum().backward()
    assert kernels == ["forward, saves"] * 3 + ["backward"] * 3


def test_frozen_layers_below_save_nothing_and_have_no_backward(kernels: list[str]) -> None:
    module, original = pair("gru", 4, 4, 3, backend="persistent")
    x = rows(5, 2, 4).detach()
    for each in (module, original):
        for name, parameter in each.named_parameters():
            parameter.requires_grad = name.endswith("l2")
        each(x)[0].square().sum().backward()
    assert kernels == ["forward", "forward", "forward, saves", "backward"]
    assert_same(
        [p.grad for p in list(module.parameters())[8:]], [p.grad for p in list(original.parameters())[8:]]
    )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_gradient_of_the_input_alone(bidirectional: bool) -> None:
    module, original = pair("lstm", 5, 3, 2, bidirectional=bidirectional, backend="persistent")
    x = rows(4, 2, 5)
    for each in (module, original):
        each.requires_grad_(False)
    found, expected = (torch.autograd.grad(each(x)[0].square().sum(), x)[0] for each in (module, original))
    assert_same([found], [expected])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("backend", ["persistent", "reference"])
@pytest.mark.parametrize("p", [0.5, 1.0])
def test_gradients_see_the_elements_that_were_dropped(backend: str, p: float) -> None:
    module, _ = pair("lstm", 4, 3, 3, bidirectional=True, dropout=p, backend=backend)
    x = rows(5, 2, 4)
    inputs = [x, *module.parameters()]

    def found(**options: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        return list(torch.autograd.grad(module(x)[0].square().sum(), inputs, **options))

    plain, differentiable = found(), found(create_graph=True)
    assert all(grad.requires_grad for grad in differentiable)
    assert_same(plain, differentiable)
    if p == 1:
        return

    def run(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        out: torch.Tensor = module(x)[0]
        return out

    assert torch.autograd.gradcheck(run, x, fast_mode=True)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("backend", "hidden"), [("reference", 3), ("persistent", 4), ("persistent", 3)])
def test_final_states_can_be_changed_in_place(backend: str, hidden: int) -> None:
    module, original = pair("lstm", 4, hidden, backend=backend)
    x = rows(5, 2, 4)
    grads = []
    for each in (module, original):
        out, (h_n, c_n) = each(x)
        total = out.sum() + h_n.add_(1).square().sum() + c_n.neg_().square().sum()
        grads.append(torch.autograd.grad(total, x)[0])
    assert_same(grads[:1], grads[1:])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("backend", ["persistent", "reference"])
def test_gradients_lie_in_memory_of_their_own(backend: str) -> None:
    for module in (GRU(4, 4, 2, backend=backend), LSTM(4, 3, bidirectional=True, backend=backend)):
        module(torch.randn(3, 2, 4))[0].sum().backward()
        before = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        for index, parameter in enumerate(module.parameters()):
            assert parameter.grad is not None
            assert parameter.grad.is_contiguous()
            parameter.grad.add_(index + 1)
        after = [p.grad for p in module.parameters()]
        assert_same(after, [grad + index + 1 for index, grad in enumerate(before)], tolerance=1e-6)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_checkpoints_and_offloading(cell: str) -> None:
    module, _ = pair(cell, 4, 3, 2, bidirectional=True)
    x = rows(5, 2, 4)
    parameters = list(module.parameters())
    expected = gradients([module(x)[0]], parameters)
    for reentrant in (False, True):
        assert_same(gradients_of(checkpoint(module, x, use_reentrant=reentrant)[0], module), expected)
    with torch.autograd.graph.save_on_cpu():
        out = module(x)[0]
    assert_same(gradients([out], parameters), expected)


def gradients_of(out: torch.Tensor, module: torch.nn.Module) -> list[torch.Tensor | None]:
    """The same as ``gradients`` of the parameters, by ``backward``, which is what checkpoints need."""
    module.zero_grad()
    generator = torch.Generator().manual_seed(7)
    (out * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum().backward()
    return [p.grad for p in module.parameters()]


def test_hooks_and_views_of_weights() -> None:
    module, original = pair("gru", 4, 3)
    seen: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.append(name))
    x = rows(5, 2, 4)
    module(x)[0].sum().backward()
    assert sorted(seen) == sorted(dict(original.named_parameters()))
    torch.nn.utils.parametrizations.weight_norm(module, "weight_hh_l0")
    torch.nn.utils.parametrizations.weight_norm(original, "weight_hh_l0")
    assert_same([module(x)[0]], [original(x)[0]])
    assert_same(gradients([module(x)[0]], [x]), gradients([original(x)[0]], [x]))


def test_blocks_in_tf32_that_overlap_leave_the_setting_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of two threads do, of which the first to begin is the first to end."""
    monkeypatch.setattr(products, "allows_tf32", lambda dtype, device: True)
    matmul, x = torch.backends.cuda.matmul, torch.empty(1)
    before = matmul.fp32_precision
    first, second = products.precision(x), products.precision(x)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert matmul.fp32_precision == "tf32"
    second.__exit__(None, None, None)
    assert matmul.fp32_precision == before


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_an_initial_state_is_not_rounded_to_tf32_in_the_gradient(
    cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one step the hidden weights' gradient is all the initial state's."""
    torch.manual_seed(0)
    module = (LSTM if cell == "lstm" else GRU)(5, 9, backend="reference")
    x, h0 = torch.randn(1, 6, 5), torch.randn(1, 6, 9)
    hx = (h0, torch.randn(1, 6, 9)) if cell == "lstm" else h0

    def weight_gradient() -> torch.Tensor:
        out = module(x, hx)[0]
        return torch.autograd.grad(out.square().sum(), module.weight_hh_l0)[0]

    def rounded(t: torch.Tensor) -> torch.Tensor:
        return ((t.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)

    exact, parted = weight_gradient(), products._exactly
    monkeypatch.setattr(products, "allows_tf32", lambda dtype, device: True)
    monkeypatch.setattr(products, "_exactly", lambda *factors: tuple(map(rounded, parted(*factors))))
    assert (weight_gradient() - exact).norm() < 1e-6 * exact.norm()
    monkeypatch.setattr(products, "_exactly", lambda *factors: tuple(map(rounded, factors)))
    assert (weight_gradient() - exact).norm() > 1e-5 * exact.norm()
