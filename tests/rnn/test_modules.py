"""The modules compute what ``torch.nn``'s do, with every option of theirs and with lengths and resets."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from recurrence import CELLS, assert_same, gradients, loop, pair, state, tensors
from tilefit.errors import TilefitError, UsageError
from tilefit.nn import LSTM

cells = pytest.mark.parametrize("cell", CELLS)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def assert_same_function(module: Any, original: Any, x: torch.Tensor, hx: Any, **rest: Any) -> None:
    """Same outputs, and same gradients of the input, the initial state and every parameter."""
    expected = tensors(*(loop(original, x, hx, **rest) if rest else original(x, hx)))
    found = tensors(*module(x, hx, **rest))
    assert_same(found, expected)
    inputs = [x, *(tensors(hx) if hx is not None else [])]
    assert_same(
        gradients(found, [*inputs, *module.parameters()]),
        gradients(expected, [*inputs, *original.parameters()]),
    )


@cells
@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_stacks_are_those_of_torch(cell: str, layers: int, bidirectional: bool) -> None:
    module, original = pair(cell, 5, 3, layers, bidirectional=bidirectional)
    assert_same_function(module, original, rows(4, 2, 5), state(original, 2))


@cells
@pytest.mark.parametrize("inputs", [1, 5])
@pytest.mark.parametrize("options", [{"bias": False}, {"batch_first": True}, {"recompute": True}])
def test_options_are_those_of_torch(cell: str, options: dict[str, bool], inputs: int) -> None:
    module, original = pair(cell, inputs, 7, bidirectional=True, **options)
    batch = 3
    shape = (batch, 4, inputs) if original.batch_first else (4, batch, inputs)
    assert_same_function(module, original, rows(*shape), state(original, batch))


@cells
@given(data=st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_size_lengths_and_resets(cell: str, data: st.DataObject) -> None:
    size = st.integers(1, 5)
    steps, batch, inputs, hidden = (data.draw(size) for _ in range(4))
    module, original = pair(
        cell,
        inputs,
        hidden,
        data.draw(st.integers(1, 2)),
        bias=data.draw(st.booleans()),
        bidirectional=data.draw(st.booleans()),
        recompute=data.draw(st.booleans()),
    )
    lengths = data.draw(st.none() | st.lists(st.integers(0, steps), min_size=batch, max_size=batch))
    flags = st.lists(st.booleans(), min_size=steps * batch, max_size=steps * batch)
    reset = data.draw(st.none() | flags)
    hx = state(original, batch) if data.draw(st.booleans()) else None
    rest = {
        "lengths": None if lengths is None else torch.tensor(lengths),
        "reset": None if reset is None else torch.tensor(reset).view(steps, batch),
    }
    assert_same_function(module, original, rows(steps, batch, inputs), hx, **rest)


@cells
@pytest.mark.parametrize("backend", ["reference", "cudnn"])
def test_lengths_are_what_truncating_each_row_gives(cell: str, backend: str) -> None:
    module, original = pair(cell, 5, 3, 2, bidirectional=True, batch_first=True, backend=backend)
    x, hx, lengths = rows(4, 6, 5), state(original, 4), torch.tensor([2, 6, 0, 5])
    out, ends = module(x, hx, lengths=lengths)
    for b, length in enumerate(lengths.tolist()):
        assert not out[b, length:].any()
        own = [s[:, b] for s in tensors(hx)]
        if length == 0:
            assert_same([s[:, b] for s in tensors(ends)], own)
            continue
        first = tuple(own) if cell == "lstm" else own[0]
        row, row_ends = original(x[b, :length], first)
        assert_same([out[b, :length], *(s[:, b] for s in tensors(ends))], [row, *tensors(row_ends)])


@cells
@pytest.mark.parametrize("backend", ["reference", "cudnn"])
@pytest.mark.parametrize("sorted_already", [True, False])
def test_packed_sequences_come_back_packed_and_in_order(
    cell: str, backend: str, sorted_already: bool
) -> None:
    module, original = pair(cell, 5, 3, 2, bidirectional=True, backend=backend)
    x, hx = rows(6, 4, 5), state(original, 4)
    lengths = torch.tensor([6, 5, 5, 1] if sorted_already else [5, 1, 6, 5])

    def run(module: Any, hx: Any) -> list[torch.Tensor]:
        packed = pack_padded_sequence(x, lengths, enforce_sorted=sorted_already)
        out, ends = module(packed, hx)
        assert isinstance(out, PackedSequence)
        for ours, theirs in zip(out[1:], packed[1:], strict=True):
            assert ours is None if theirs is None else torch.equal(ours, theirs)
        return [out.data, *tensors(ends)]

    for first in (hx, None):
        found, expected = run(module, first), run(original, first)
        assert_same(found, expected)
        assert_same(gradients(found, [x]), gradients(expected, [x]))


@cells
@pytest.mark.parametrize("batch_first", [False, True])
def test_one_sequence_needs_no_batch(cell: str, batch_first: bool) -> None:
    module, original = pair(cell, 5, 3, 2, batch_first=batch_first)
    x = rows(6, 5)
    hx = tuple(s[:, 0] for s in state(original, 1)) if cell == "lstm" else state(original, 1)[:, 0]
    for first in (hx, None):
        assert_same(tensors(*module(x, first)), tensors(*original(x, first)))
    reset = torch.tensor([False, False, True, False, False, False])
    out, _ = module(x, hx, reset=reset)
    assert_same([out[2:]], [module(x[2:])[0]])


def test_a_reset_follows_the_layout_of_the_input() -> None:
    module, original = pair("lstm", 5, 3, batch_first=True)
    x, reset = rows(2, 6, 5), torch.zeros(2, 6, dtype=torch.bool)
    reset[1, 4] = True
    out, _ = module(x, reset=reset)
    assert_same([out[0], out[1, 4:]], [original(x)[0][0], original(x[1, 4:])[0]])


def test_a_state_before_a_reset_does_not_matter_even_if_it_is_not_a_number() -> None:
    module, _ = pair("lstm", 5, 3)
    h0 = torch.full((1, 2, 3), torch.nan, dtype=torch.float64)
    reset = torch.zeros(4, 2, dtype=torch.bool)
    reset[0] = True
    x = rows(4, 2, 5)
    assert_same([module(x, (h0, h0), reset=reset)[0]], [module(x)[0]])


@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False}])
def test_projections_are_run_by_torch(options: dict[str, Any]) -> None:
    module, original = pair("lstm", 5, 4, proj_size=2, backend=None, **options)
    x, hx = rows(6, 3, 5), state(original, 3)
    assert_same(tensors(*module(x, hx)), tensors(*original(x, hx)))
    out, _ = module(x, hx, lengths=torch.tensor([6, 2, 4]))
    assert not out[2:, 1].any()
    module.backend = "reference"
    with pytest.raises(TilefitError, match="proj_size"):
        module(x)


def test_dropout_falls_between_layers_in_training_only() -> None:
    module, original = pair("gru", 5, 4, 2, dropout=1.0)
    x = rows(6, 3, 5)
    assert_same([module(x)[0]], [original(x)[0]])  # all of the first layer's output is dropped
    module.eval(), original.eval()
    assert_same([module(x)[0]], [original(x)[0]])
    module.train().dropout = 0.5
    torch.manual_seed(0)
    assert not torch.equal(module(x)[0], module(x)[0])


@cells
def test_state_dicts_fit_both_ways(cell: str) -> None:
    module, original = pair(cell, 5, 3, 2, bidirectional=True)
    assert list(module.state_dict()) == list(original.state_dict())
    original.load_state_dict(module.state_dict())
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    x = rows(4, 2, 5)
    assert_same([again(x)[0]], [original(x)[0]])


def test_a_copy_is_independent() -> None:
    module, _ = pair("lstm", 5, 3)
    x = rows(4, 2, 5)
    before = module(x)[0]
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert_same([module(x)[0]], [before])
    assert not other(x)[0].any()


def test_parameters_put_in_place_for_a_call_are_the_ones_used() -> None:
    module, original = pair("gru", 5, 3)
    x = rows(4, 2, 5)
    doubled = {name: 2 * parameter for name, parameter in original.named_parameters()}
    expected = torch.func.functional_call(original, doubled, (x,))[0]
    assert_same([torch.func.functional_call(module, doubled, (x,))[0]], [expected])


@pytest.mark.parametrize("backend", ["reference", "cudnn"])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_autocast_decides_the_type_of_the_results(cell: str, backend: str) -> None:
    module, _ = pair(cell, 8, 16, 2, backend=backend)
    module = module.float()
    x = torch.randn(5, 3, 8)
    # Not every CPU has oneDNN's recurrent layers in half precision.
    with torch.autocast("cpu", torch.bfloat16), torch.backends.mkldnn.flags(enabled=False):
        out, ends = module(x)
    assert {t.dtype for t in tensors(out, ends)} == {torch.bfloat16}
    torch.testing.assert_close(out.float(), module(x)[0], rtol=0, atol=0.03)
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())


def test_only_what_needs_a_gradient_gets_one() -> None:
    module, original = pair("lstm", 5, 3, bidirectional=True)
    for each in (module, original):
        for name, parameter in each.named_parameters():
            parameter.requires_grad = name in ("weight_hh_l0", "bias_ih_l0_reverse")
    x = rows(4, 2, 5).detach()
    for each in (module, original):
        each(x)[0].square().sum().backward()
    for ours, theirs in zip(module.parameters(), original.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            assert_same([ours.grad], [theirs.grad])
    assert not module.requires_grad_(False)(x)[0].requires_grad


def test_a_gradient_of_the_final_state_alone() -> None:
    module, original = pair("lstm", 5, 3, 2)
    x = rows(4, 2, 5)
    found, expected = (each(x)[1][1] for each in (module, original))
    assert_same(gradients([found], [x]), gradients([expected], [x]))


def test_recomputing_saves_less_for_the_same_gradients() -> None:
    def saved_bytes(module: nn.Module) -> int:
        found: dict[int, int] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            result = module(x)
        del result
        return sum(found.values())

    module, _ = pair("lstm", 4, 8)
    again = copy.deepcopy(module)
    again.recompute = True
    x = rows(50, 4, 4)
    gates_bytes = 50 * 4 * 4 * 8 * 8
    assert saved_bytes(module) - saved_bytes(again) == gates_bytes
    assert_same(gradients([again(x)[0]], again.parameters()), gradients([module(x)[0]], module.parameters()))


def test_gradients_per_sample_and_other_transforms() -> None:
    module, _ = pair("lstm", 3, 4)
    x = rows(5, 2, 3)
    parameters = dict(module.named_parameters())

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, parameters, (x,))[0].square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 1))(parameters, x.unsqueeze(2))
    total = torch.autograd.grad(loss(parameters, x), list(parameters.values()))
    assert_same([each[name].sum(0) for name in parameters], total)


@pytest.mark.parametrize(
    ("shape", "hx"), [((4, 2, 6), None), ((4, 2, 5, 1), None), ((4, 2, 5), torch.zeros(2, 2, 3))]
)
def test_arguments_that_do_not_fit_get_torchs_own_error(shape: tuple[int, ...], hx: Any) -> None:
    module, original = pair("gru", 5, 3)
    x = torch.zeros(shape, dtype=torch.float64)
    hx = hx.double() if hx is not None else None
    errors = []
    for each in (module, original):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            each(x, hx)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ({"lengths": torch.tensor([1, 2, 3])}, "lengths is"),
        ({"lengths": torch.tensor([1, 5])}, "within 0 and 4"),
        ({"lengths": torch.tensor([1.0, 2.0])}, "lengths is"),
        ({"lengths": [1, 2]}, "lengths is a list"),
        ({"reset": torch.zeros(2, 4)}, "reset is"),
    ],
)
def test_lengths_and_resets_that_do_not_fit(rest: dict[str, Any], message: str) -> None:
    module, _ = pair("gru", 5, 3)
    with pytest.raises(UsageError, match=message):
        module(rows(4, 2, 5), **rest)


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_reset_of_another_layout_is_told_as_it_was_given(batch_first: bool) -> None:
    module, _ = pair("gru", 5, 3, batch_first=batch_first)
    with pytest.raises(UsageError) as caught:
        module(rows(4, 2, 5), reset=torch.zeros(2, 4))
    assert (caught.value.what, "Give [4, 2]" in caught.value.hint) == ("reset is [2, 4]", True)


def test_lengths_go_with_padded_batches_only() -> None:
    module, _ = pair("gru", 5, 3)
    x = rows(4, 2, 5)
    with pytest.raises(UsageError, match="PackedSequence"):
        module(pack_padded_sequence(x, torch.tensor([4, 4])), lengths=torch.tensor([4, 4]))
    with pytest.raises(UsageError, match="one"):
        module(x[:, 0], lengths=torch.tensor(4))


def test_the_constructor_takes_what_torchs_takes() -> None:
    ours, theirs = CELLS["rnn_relu"][:2]
    arguments = (5, 3, 2, "relu", False, True)
    assert repr(ours(*arguments)) == repr(theirs(*arguments))
    assert repr(LSTM(5, 3, backend="cudnn", recompute=True)) == "LSTM(5, 3, backend=cudnn, recompute=True)"
    with pytest.raises(ValueError, match="nonlinearity"):
        ours(5, 3, nonlinearity="gelu")
    with pytest.raises(UsageError, match="unknown backend"):
        LSTM(5, 3, backend="fast")
