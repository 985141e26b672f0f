"""What the numerical trackers measure."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from precision.loops.parts import BF16, FP16, batch, mse, net, scaler
from tilefit.precision import watch
from tilefit.precision.numerics import Histogram


@pytest.mark.parametrize(
    ("counts", "interval"),
    [
        # The smallest, 2^-30, must reach 2^-24; the largest, 2^0, must stay below 2^13.
        ({-30: 100, 0: 100}, (6, 13)),
        # Fewer than one in a hundred may be lost.
        ({-60: 1, -30: 100, 0: 100}, (6, 13)),
        ({-30: 100, 10: 1}, (6, 3)),
        ({-10: 5}, (-14, 23)),
        ({}, None),
    ],
)
def test_the_loss_scales_that_fit(counts: dict[int, int], interval: tuple[int, int] | None) -> None:
    assert Histogram(counts=Counter(counts)).scale_interval() == interval


@pytest.mark.parametrize(
    ("dtype", "values", "zeros", "counts"),
    [
        # 1.5 is in [2^0, 2^1), 0.25 is 2^-2; then the smallest number of all, and the largest.
        (FP16, [0.0, -0.0, 1.5, -1.0, 0.25, 2.0**-24, 65504.0, torch.inf, torch.nan], 2, [0, 0, -2, -24, 15]),
        (BF16, [0.0, 3.0, 2.0**-126, 2.0**-133, 2.0**127, -torch.inf], 1, [1, -126, -133, 127]),
        (FP16, [torch.nan, torch.inf], 0, []),
    ],
)
def test_every_finite_gradient_is_counted_once(
    dtype: torch.dtype, values: list[float], zeros: int, counts: list[int]
) -> None:
    weight = torch.ones(1, len(values), dtype=dtype, requires_grad=True)
    given = torch.tensor([values], dtype=dtype)
    identity = torch.ones(1, 1, dtype=dtype)
    with watch() as w:
        optimizer = SGD([weight], lr=0.0)
        for _ in range(2):  # a close look begins when a step has ended
            optimizer.zero_grad()
            # The gradient of the weight is a product with one, so it is what was given.
            torch.mm(identity, weight).backward(given)
            optimizer.step()
    found = w._exponents.histograms[dtype]
    assert found.zeros == zeros
    assert found.counts == Counter(counts)


def _gradients(scale: float) -> Histogram:
    torch.manual_seed(0)
    model, s = net(), scaler(init_scale=scale)
    optimizer = SGD(model.parameters(), lr=0.0)
    with watch(model, optimizer=optimizer, every=1) as w:
        for _ in range(4):
            optimizer.zero_grad()
            s.scale(mse(model, *batch())).backward()
            s.step(optimizer)
            s.update()
    return w._exponents.histograms[FP16]


def test_the_histogram_of_gradients_does_not_depend_on_the_scale() -> None:
    small, large = _gradients(2.0**8), _gradients(2.0**12)
    assert small.total == large.total > 0
    # Only what is subnormal at the smaller scale may differ.
    common = [e for e in small.counts | large.counts if e > -20]
    assert [small.counts[e] for e in common] == [large.counts[e] for e in common]


def test_the_report_advises_on_the_scale() -> None:
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    with watch(model, optimizer=optimizer) as w:
        for _ in range(4):
            optimizer.zero_grad()
            s.scale(mse(model, *batch())).backward()
            s.step(optimizer)
            s.update()
    table = w.report().tables[0]
    assert "in fp16 a loss scale from 2^" in table.rows[0][-1]


def test_a_buffer_of_positions_that_was_cast_is_found() -> None:
    class Model(nn.Module):
        def __init__(self, length: int) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)
            self.register_buffer("positions", torch.arange(length).float())

    with watch(Model(1000).bfloat16()) as w:
        pass
    (alarm,) = w.alarms
    assert (alarm.code, alarm.module) == ("AMP016", "positions")
    assert "of 1000 distinct ones 507 are left" in alarm.message
    with watch(Model(256).bfloat16()) as w:
        pass
    assert w.alarms == ()
    with watch(Model(1000)) as w:
        pass
    assert w.alarms == ()


def test_a_scale_that_a_fused_optimizer_drives_down_is_found() -> None:
    model, s = net(), scaler(init_scale=4.0)
    optimizer = Adam(model.parameters(), fused=True)
    with watch(model, optimizer=optimizer, every=1) as w:
        for _ in range(6):
            x, y = batch()
            optimizer.zero_grad()
            s.scale(mse(model, x * torch.nan, y)).backward()
            s.step(optimizer)
            s.update()
    assert "AMP029" in [alarm.code for alarm in w.alarms]
    assert any("fused optimizer" in what for what in w.report().unchecked)


@pytest.mark.parametrize(("rate", "lost"), [(1e-5, True), (0.3, False)])
def test_bf16_weights_move_or_not_by_their_rate(rate: float, lost: bool) -> None:
    torch.manual_seed(0)
    model = net().bfloat16()
    optimizer = SGD(model.parameters(), lr=rate, momentum=0.9)
    with watch(model, optimizer=optimizer) as w:
        for _ in range(33):
            x, y = batch()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x.to(BF16)).float(), y).backward()
            optimizer.step()
    assert ("AMP013" in [alarm.code for alarm in w.alarms]) is lost


def test_following_weights_does_not_disturb_a_restarted_optimizer() -> None:
    def train(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = net().bfloat16()
        optimizer = Adam(model.parameters(), lr=1e-2)
        w = watch(model, optimizer=optimizer)
        for step in range(40):
            if watched and step == 3:
                w.start()
            x, y = batch()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x.to(BF16)).float(), y).backward()
            optimizer.step()
        w.stop()
        return [p.detach().clone() for p in model.parameters()]

    for alone, watched in zip(train(False), train(True), strict=True):
        assert torch.equal(alone, watched)


class _RootOfNothing(nn.Module):
    """The root of zero is zero; its slope is not finite."""

    def __init__(self, when: int) -> None:
        super().__init__()
        self.inner, self.calls, self.when = nn.Linear(8, 4), 0, when

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.inner(x)
        return torch.sqrt(h * 0) if self.calls == self.when else h  # here


_LINES = Path(__file__).read_text().splitlines()
_LINE = next(n for n, line in enumerate(_LINES, 1) if line.endswith("# here"))


@pytest.mark.parametrize("when", [1, 7])
def test_the_first_nan_of_a_backward_pass_is_found_before_it_spoils_the_weights(when: int) -> None:
    def codes(**options: bool) -> list[tuple[str, str, str]]:
        model = _RootOfNothing(when)
        optimizer = SGD(model.parameters(), lr=0.1)
        with watch(model, optimizer=optimizer, **options) as w:
            for _ in range(10):
                x, y = batch()
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        return [(alarm.code, alarm.message.partition(" ")[0], alarm.source) for alarm in w.alarms]

    first = codes(find_non_finite=True)[0]
    assert first[:2] == ("AMP026", "div")  # the slope of the root: 1 / (2 * 0)
    assert first[2].endswith(f"test_numerics.py:{_LINE}")
    if when == 1:
        assert ("AMP026", "the", "") in codes()  # too late: the weights hold it


def test_overflows_that_the_scaler_answers_are_no_origin() -> None:
    model, s = net(), scaler(init_scale=2.0**26)
    optimizer = Adam(model.parameters())
    with watch(model, optimizer=optimizer, scaler=s, find_non_finite=True) as w:
        for _ in range(10):
            optimizer.zero_grad()
            s.scale(mse(model, *batch())).backward()
            s.step(optimizer)
            s.update()
    assert w.alarms == ()


@pytest.mark.parametrize(("size", "codes"), [(3000.0, {"AMP031"}), (30.0, set())])
def test_the_norm_of_all_gradients_that_clipping_takes_may_overflow(size: float, codes: set[str]) -> None:
    weight = torch.ones(64, 64, dtype=FP16, requires_grad=True)
    with watch() as w:
        optimizer = SGD([weight], lr=0.0)
        for _ in range(3):
            optimizer.zero_grad()
            weight.backward(torch.full_like(weight, size))
            nn.utils.clip_grad_norm_([weight], 1.0)
            optimizer.step()
    assert {finding.code for finding in w.report().findings if finding.code == "AMP031"} == codes


def test_the_report_says_from_which_scale_to_which() -> None:
    model, s = net(), scaler(init_scale=2.0**24)
    optimizer = Adam(model.parameters())
    with watch(model, optimizer=optimizer, every=1) as w:
        for _ in range(4):
            optimizer.zero_grad()
            s.scale(mse(model, *batch())).backward()
            s.step(optimizer)
            before = s.get_scale()
            s.update()
    assert before < 2**24
    assert w.report().setup[1] == f"loss scale 16777216 to {before:.0f}"
