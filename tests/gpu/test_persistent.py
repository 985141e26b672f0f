"""The persistent kernels on a GPU: as the reference, the same every time, and never a hang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from tilefit.rnn import reference
from tilefit.rnn.cells import CELLS, Backward, Forward, Grads, Rows
from tilefit.rnn.persistent import launch, layer
from tilefit.rnn.persistent.launch import Kernel, LaunchError
from tilefit.rnn.persistent.variant import Capacity, Problem, Variant, predicted_s, variants

pytestmark = pytest.mark.gpu

cells = pytest.mark.parametrize("cell", CELLS)

#: Largest error, relative to the largest value: a few roundings, of TF32's factors for float32.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 4e-3}


@pytest.fixture
def jitter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels whose thread blocks wait random times."""
    monkeypatch.setattr(layer, "Kernel", partial(Kernel, jitter=True))
    layer._kernel.cache_clear()
    yield
    layer._kernel.cache_clear()


class Layer:
    """A layer's random inputs, on the GPU."""

    def __init__(
        self, cell: str, dtype: torch.dtype, hidden: int, batch: int, steps: int, directions: int = 1
    ) -> None:
        self.cell = CELLS[cell]
        self.shape = (steps, batch, directions, hidden)
        self.dtype = dtype
        gates = self.cell.gates * hidden
        self.xg = self.random(steps, batch, directions, gates)
        self.w_hh = self.random(directions, gates, hidden) * hidden**-0.5
        self.bias_n = self.random(directions, hidden) if self.cell.is_gru else None
        self.h0 = self.random(directions, batch, hidden).tanh()
        self.c0 = self.random(directions, batch, hidden) if self.cell.has_c else None
        self.lengths: Tensor | None = None
        self.reset: Tensor | None = None
        self.grads = (self.random(*self.shape), self.random(*self.h0.shape))
        self.grad_cn = self.random(*self.h0.shape) if self.cell.has_c else None

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").to(self.dtype)

    def ragged(self) -> Layer:
        """With lengths and resets."""
        steps, batch, *_ = self.shape
        self.lengths = torch.randint(0, steps + 1, (batch,), device="cuda", dtype=torch.int32)
        self.reset = (torch.rand(steps, batch, device="cuda") < 0.1).to(torch.uint8)
        return self

    def forward(self, run: Callable[..., Forward]) -> Forward:
        return run(self.cell, self.xg, self.w_hh, self.bias_n, self.rows(), save=True)

    def backward(self, run: Callable[..., Backward], saved: Forward) -> Backward:
        results = (saved.out, saved.gates, saved.c)
        return run(self.cell, Grads(*self.grads, self.grad_cn), results, self.w_hh, self.rows())

    def rows(self) -> Rows:
        return Rows(self.h0, self.c0, self.lengths, self.reset)

    def assert_as_reference(self) -> None:
        expected, found = self.forward(reference.forward), self.forward(layer.forward)
        assert_close([found.out, found.c_n], [expected.out, expected.c_n])
        assert_close(self.backward(layer.backward, expected), self.backward(reference.backward, expected))


def assert_close(found: list[Tensor] | Backward, expected: list[Tensor] | Backward) -> None:
    for one, other in zip(found, expected, strict=True):
        if other.numel():
            error = (one.float() - other.float()).abs().max() / other.float().abs().max().clamp(min=1)
            assert float(error) <= TOLERANCE[one.dtype]


@cells
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("hidden", "batch", "directions"), [(1, 1, 1), (33, 5, 2), (250, 17, 1), (517, 40, 2)]
)
def test_odd_sizes(cell: str, dtype: torch.dtype, hidden: int, batch: int, directions: int) -> None:
    torch.manual_seed(0)
    Layer(cell, dtype, hidden, batch, 12, directions).assert_as_reference()


@cells
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("hidden", "batch"), [(64, 6), (300, 33)])
def test_lengths_and_resets(cell: str, dtype: torch.dtype, hidden: int, batch: int) -> None:
    torch.manual_seed(1)
    Layer(cell, dtype, hidden, batch, 20, 2).ragged().assert_as_reference()


@cells
@pytest.mark.usefixtures("jitter")
@pytest.mark.parametrize(("hidden", "batch"), [(64, 8), (256, 16), (1024, 32)])
def test_delays_change_no_bit(cell: str, hidden: int, batch: int) -> None:
    torch.manual_seed(2)
    problem = Layer(cell, torch.bfloat16, hidden, batch, 64).ragged()
    inside = torch.arange(64, device="cuda")[:, None] < problem.lengths
    first = problem.forward(layer.forward)
    first_grads = problem.backward(layer.backward, first)
    for _ in range(50):
        again = problem.forward(layer.forward)
        assert torch.equal(again.out, first.out)
        assert torch.equal(again.c_n, first.c_n)
        if again.gates.numel():
            assert torch.equal(again.gates[inside], first.gates[inside])
        for one, other in zip(problem.backward(layer.backward, first), first_grads, strict=True):
            assert torch.equal(one, other)


@cells
@pytest.mark.usefixtures("jitter")
@pytest.mark.parametrize("ahead", [False, True])
def test_several_rounds(cell: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not each asks for the next one before it is finished, whatever the table prefers."""
    ran = []

    def cut(problem: Problem, capacity: Capacity) -> Variant:
        alike = (v for v in variants(problem, capacity) if v.rounds == 2 and bool(v.ahead) == ahead)
        ran.append(min(alike, key=lambda variant: predicted_s(problem, variant)))
        return ran[-1]

    monkeypatch.setattr(layer, "chosen", cut)
    torch.manual_seed(4)
    Layer(cell, torch.bfloat16, 256, 32, 20).ragged().assert_as_reference()
    assert len(ran) == 2


@cells
def test_several_streams(cell: str) -> None:
    torch.manual_seed(3)
    problems = [Layer(cell, torch.float16, 256, 8, 200) for _ in range(4)]
    alone = [problem.forward(layer.forward).out for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(10):
        together = []
        for problem, stream in zip(problems, streams, strict=True):
            with torch.cuda.stream(stream):
                together.append(problem.forward(layer.forward).out)
        torch.cuda.synchronize()
        assert all(map(torch.equal, together, alone))


@pytest.mark.usefixtures("jitter")
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_wait_without_end_is_an_error(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no patience at all the first piece that is not there yet ends the wait."""
    problem = Layer(cell, torch.bfloat16, 1024, 8, 50)
    right = problem.forward(layer.forward).out
    torch.cuda.synchronize()
    patience = launch.SPIN_LIMIT
    monkeypatch.setattr(launch, "SPIN_LIMIT", 0)
    problem.forward(layer.forward)
    torch.cuda.synchronize()  # returns: the kernel has not hung
    with pytest.raises(LaunchError, match=r"gave up(.|\n)*TILEFIT_RNN=cudnn"):
        problem.forward(layer.forward)
    monkeypatch.setattr(launch, "SPIN_LIMIT", patience)
    assert torch.equal(problem.forward(layer.forward).out, right)  # said once, and the GPU still works
