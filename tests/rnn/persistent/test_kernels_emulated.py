"""The kernels, run as C++ on the CPU, compute what the reference computes."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from rnn.persistent import emulation
from rnn.persistent.emulation import EmulatedKernel, Outcome
from tilefit.nn import GRU
from tilefit.rnn import dispatch, reference
from tilefit.rnn.cells import CELLS, Grads, Rows
from tilefit.rnn.persistent import layer
from tilefit.rnn.persistent.variant import Capacity, Problem, Variant, variants
from tilefit.rnn.states import final

pytestmark = pytest.mark.skipif(emulation.missing() is not None, reason=str(emulation.missing()))

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

#: Two roundings of a result of about 1, and what later steps make of them. The sums of the fp32 kernels
#: differ from the reference's in their order, and small layers' products in what three of TF32 leave of one.
TOLERANCE = {BF16: 2.5e-2, FP16: 4e-3, FP32: 2e-5}


class Case(NamedTuple):
    """A layer, and how its kernels are cut.

    ``split`` is 1 for the exchange through the L2 cache, 0 for mailboxes; ``kept`` puts half the weights in
    shared memory; ``groups`` split the mini-batch; ``ahead`` says when the next round is copied.
    """

    cell: str
    dtype: torch.dtype
    hidden: int
    batch: int
    steps: int
    directions: int
    ragged: str  # L: lengths, R: resets
    split: int
    warps: int
    rounds: int
    kept: bool
    groups: int = 1
    ahead: int = 0

    def __str__(self) -> str:
        return "-".join(str(value).removeprefix("torch.") for value in self)


CASES = [
    Case("lstm", BF16, 64, 10, 4, 1, "", 1, 4, 1, False),
    Case("lstm", BF16, 64, 10, 4, 1, "R", 2, 4, 1, True),
    Case("lstm", BF16, 1, 1, 1, 1, "", 1, 4, 1, False),
    Case("lstm", FP16, 33, 5, 5, 2, "LR", 1, 4, 1, True),
    Case("lstm", FP16, 136, 5, 6, 1, "LR", 0, 4, 1, False),
    Case("lstm", FP32, 20, 11, 5, 2, "LR", 1, 8, 1, False, groups=2),
    Case("gru", FP16, 40, 18, 4, 2, "L", 1, 4, 2, True, ahead=1),
    Case("gru", FP16, 61, 10, 5, 1, "LR", 0, 4, 2, True),
    Case("gru", BF16, 64, 33, 4, 1, "R", 4, 4, 2, False, ahead=2),
    Case("gru", FP32, 30, 17, 3, 1, "L", 2, 4, 1, True),
    Case("rnn_tanh", FP32, 36, 9, 5, 1, "R", 1, 4, 1, True),
    Case("rnn_tanh", FP32, 64, 10, 5, 2, "LR", 0, 4, 2, False),
    Case("rnn_tanh", BF16, 70, 20, 4, 2, "L", 0, 4, 3, False),
    Case("rnn_relu", FP16, 96, 30, 3, 1, "LR", 2, 4, 2, False, groups=2, ahead=1),
    Case("rnn_relu", BF16, 17, 1, 6, 1, "", 1, 8, 1, False),
    Case("rnn_tanh", FP32, 128, 8, 3, 1, "", 1, 4, 1, False),
    Case("lstm", BF16, 40, 18, 4, 1, "LR", 1, 4, 2, True),
    Case("lstm", FP32, 24, 5, 4, 1, "LR", 1, 4, 1, False, groups=3),
    Case("rnn_tanh", BF16, 40, 7, 4, 2, "LR", 0, 4, 1, False, groups=2),
    Case("rnn_relu", FP16, 8, 257, 2, 1, "", 1, 4, 5, False),
    Case("lstm", BF16, 24, 26, 4, 1, "LR", 1, 4, 2, True, groups=3, ahead=2),
    Case("gru", BF16, 24, 21, 1, 2, "LR", 1, 4, 2, False, ahead=2),
]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Callable[[Case], list[Variant]]:
    """Makes the layer run emulated kernels, cut as a case says, and returns the list of those it has run."""
    ran: list[Variant] = []

    def use(case: Case) -> list[Variant]:
        def cut(problem: Problem, capacity: Capacity) -> Variant:
            ran.append(variant_for(case, problem))
            return ran[-1]

        monkeypatch.setattr(layer, "chosen", cut)
        return ran

    def compiled(problem: Problem, variant: Variant, device: int) -> EmulatedKernel:
        return EmulatedKernel(problem, variant, folder(pytestconfig))

    monkeypatch.setattr(layer, "capacity", lambda device: None)
    monkeypatch.setattr(layer, "Kernel", compiled)
    layer._kernel.cache_clear()
    yield use
    layer._kernel.cache_clear()


def folder(config: pytest.Config) -> Path:
    """Where the built kernels stay from one run to the next, or only for this one without pytest's cache."""
    if config.pluginmanager.has_plugin("cacheprovider"):
        return config.cache.mkdir("tilefit-emulated-kernels")
    return _folder_of_this_run()


@cache
def _folder_of_this_run() -> Path:
    return Path(tempfile.mkdtemp(prefix="tilefit-emulated-kernels"))


def variant_for(case: Case, problem: Problem) -> Variant:
    """The first variant of that kind for a GPU of 16 multiprocessors; several blocks of it share the work."""
    small_gpu = Capacity(16, tuple(16 // size for size in range(2, 17)))
    found = next(
        variant
        for variant in variants(problem, small_gpu)
        if variant.mail == (case.split == 0)
        and (variant.mail or variant.split == case.split)
        and (variant.warps, variant.rounds, variant.batch_groups) == (case.warps, case.rounds, case.groups)
        and bool(variant.ahead) == bool(case.ahead)
        and (variant.blocks > 1 or problem.hidden <= 8)
    )
    found = found._replace(ahead=case.ahead)
    return found._replace(held=found.fragments(problem) // 2) if case.kept else found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_the_reference(case: Case, emulated: Callable[[Case], list[Variant]]) -> None:
    ran = emulated(case)
    compare(case, given=True)
    assert len(ran) == 2


# An LSTM, a GRU and an RNN.
@pytest.mark.parametrize("case", CASES[4:11:3], ids=str)
def test_states_and_gradients_that_are_not_given_are_zeros(
    case: Case, emulated: Callable[[Case], list[Variant]]
) -> None:
    emulated(case)
    compare(case, given=False)


def compare(case: Case, *, given: bool) -> None:
    """Forward and backward with random numbers; without initial states and gradients unless ``given``."""
    generator = torch.Generator().manual_seed(CASES.index(case))
    cell, hidden, batch, steps, directions = CELLS[case.cell], *case[2:6]

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(case.dtype)

    def check(found: torch.Tensor, expected: torch.Tensor) -> None:
        if expected.numel():
            tolerance = TOLERANCE[case.dtype] * max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)

    xg = random(steps, batch, directions, cell.gates * hidden)
    w_hh = random(directions, cell.gates * hidden, hidden, scale=hidden**-0.5)
    bias_n = random(directions, hidden) if cell.is_gru else None
    inside, lengths, reset = torch.ones(steps, batch, dtype=torch.bool), None, None
    if "L" in case.ragged:
        lengths = torch.randint(0, steps + 1, (batch,), generator=generator, dtype=torch.int32)
        lengths[:2] = torch.tensor([0, steps])
        inside = torch.arange(steps)[:, None] < lengths
    if "R" in case.ragged:
        reset = (torch.rand(steps, batch, generator=generator) < 0.3).to(torch.uint8)

    shapes = [(directions, batch, hidden)] * (2 if cell.has_c else 1)
    states = [random(*shape) if given else torch.zeros(shape, dtype=case.dtype) for shape in shapes]
    h0, c0 = states[0], states[1] if cell.has_c else None
    full = Rows(h0, c0, lengths, reset)
    rows = full if given else Rows(lengths=lengths, reset=reset)
    expected = reference.forward(cell, xg, w_hh, bias_n, full, save=True)
    found = layer.forward(cell, xg, w_hh, bias_n, rows, save=True)
    assert found.h_n is not None
    check(found.out, expected.out)
    check(found.h_n, final(expected.out, h0, lengths))
    check(found.c_n, expected.c_n)
    if cell.saved:
        check(found.gates[inside], expected.gates[inside])
    if cell.has_c:
        check(found.c[inside], expected.c[inside])

    def spoiled(saved: torch.Tensor) -> torch.Tensor:
        """With what a forward kernel leaves beyond a row's length: whatever was in memory."""
        return saved.masked_fill(~inside[..., None, None], torch.nan) if saved.numel() else saved

    grads = [random(steps, batch, directions, hidden), *map(torch.zeros_like, (h0, h0))]
    if given:
        grads[1:] = random(*h0.shape), random(*h0.shape)
    grads = Grads(*grads[: 3 if cell.has_c else 2])
    wanted = reference.backward(cell, grads, (expected.out, expected.gates, expected.c), w_hh, full)
    results = expected.out, spoiled(expected.gates), spoiled(expected.c)
    got = layer.backward(cell, grads if given else Grads(grads.out), results, w_hh, rows)
    for one, other in zip(got, wanted, strict=True):
        check(one, other)


def test_a_whole_module_under_autocast(
    emulated: Callable[[Case], list[Variant]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers in two directions, padded from 37 units, from weights and to gradients in float32."""
    ran = emulated(CASES[6])
    monkeypatch.setitem(dispatch._REFUSALS, "persistent", lambda call: None)
    dispatch._choose.cache_clear()
    torch.manual_seed(0)
    module = GRU(21, 37, 2, bidirectional=True, backend="persistent")
    x, h0 = torch.randn(4, 18, 21, requires_grad=True), torch.randn(4, 18, 37, requires_grad=True)
    inputs = [x, h0, *module.parameters()]
    results = []
    for backend in ("persistent", "reference"):
        module.backend = backend
        with torch.autocast("cpu", FP16):
            out, h_n = module(x, h0)
        assert out.dtype is FP16
        grads = torch.autograd.grad([out, h_n], inputs, [torch.ones_like(out), torch.ones_like(h_n)])
        assert all(grad.dtype is torch.float32 for grad in grads)
        results.append([out.detach().float(), h_n.detach().float(), *grads])
    dispatch._choose.cache_clear()
    assert {variant.rounds for variant in ran} == {2}
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=4e-3 * max(1.0, float(other.abs().max())))


def test_views_that_begin_at_any_element(emulated: Callable[[Case], list[Variant]]) -> None:
    """As of a flat vector, in which gradients of concatenated tensors lie too."""
    case = CASES[6]
    emulated(case)
    generator = torch.Generator().manual_seed(0)
    shape = (case.directions, case.batch, case.hidden)

    def view(*shape: int) -> torch.Tensor:
        return torch.rand(math.prod(shape) + 1, generator=generator).to(case.dtype)[1:].view(shape)

    xg, w_hh = view(4, case.batch, 2, 120), view(2, 120, case.hidden) / 40
    given = (w_hh, view(2, case.hidden), view(*shape))
    grads = Grads(view(4, case.batch, 2, case.hidden), view(*shape))
    results = []
    for w_hh, bias_n, h0 in (given, [t.clone() for t in given]):
        out = layer.forward(CELLS["gru"], xg, w_hh, bias_n, Rows(h0), save=True)
        found = layer.backward(CELLS["gru"], grads, (out.out, out.gates, out.c), w_hh, Rows(h0))
        results.append((out.out, found.dg, found.grad_h0))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_block_that_never_comes_ends_in_an_error(pytestconfig: pytest.Config) -> None:
    problem = Problem(CELLS["rnn_relu"], "bfloat16", 24, 1)
    kernel = EmulatedKernel(problem, variant_for(CASES[14], problem), folder(pytestconfig))
    assert kernel.run(inputs(problem), 2) == Outcome(gave_up=False, overran=0)
    assert kernel.run(inputs(problem), 2, spin_limit=100, missing_blocks=1).gave_up


def test_not_a_number_arrives_like_any_number(pytestconfig: pytest.Config) -> None:
    """Even with the bits that stand for a word that was not written yet."""
    problem = Problem(CELLS["rnn_tanh"], "bfloat16", 24, 1)
    kernel = EmulatedKernel(problem, variant_for(CASES[14], problem), folder(pytestconfig))
    for name in ("h0", "projected", "weights"):
        tensors = inputs(problem)
        tensors[name].view(torch.int16)[..., 5] = -1
        assert kernel.run(tensors, 2) == Outcome(gave_up=False, overran=0)
        assert tensors["out"][1].isnan().any()


def inputs(problem: Problem) -> dict[str, torch.Tensor]:
    """What the forward kernel of a tanh or ReLU layer is launched with, for two steps."""
    hidden = problem.hidden
    return {
        "projected": torch.ones(2, 1, 1, hidden, dtype=BF16),
        "weights": torch.eye(hidden, dtype=BF16)[None],
        "h0": torch.ones(1, 1, hidden, dtype=BF16),
        "last_hidden": torch.empty(1, 1, hidden, dtype=BF16),
        "out": torch.empty(2, 1, 1, hidden, dtype=BF16),
    }
