"""Mistakes of what is stored in which precision, and of how gradients are accumulated."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from precision.loops import right, wrong
from precision.loops.parts import BF16, FP16, autocast, batch, mse, net, scaler

STEPS = 5
LONG = 34


def _half_step(model: nn.Module, optimizer: Optimizer, dtype: torch.dtype = BF16) -> None:
    x, y = batch()
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x.to(dtype)).float(), y).backward()


# ---- 13 updates below the spacing ----------------------------------------------------------------


@wrong(13)
def bf16_weights_with_a_small_rate():
    model = net().bfloat16()
    optimizer = SGD(model.parameters(), lr=1e-5)
    for _ in range(LONG):
        _half_step(model, optimizer)
        optimizer.step()  # here


@wrong(13)
def bf16_weights_under_adam():
    model = net().bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    for _ in range(LONG):
        _half_step(model, optimizer)
        optimizer.step()  # here


class _StochasticSGD(SGD):
    """Rounds each update up or down at random, in proportion."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                wide = p.float() - group["lr"] * p.grad.float()
                noise = torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32)
                p.copy_(((wide.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32))


class _KahanSGD(SGD):
    """Keeps what each update lost, and adds it to the next."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                lost = self.state[p].setdefault("lost", torch.zeros_like(p))
                change = lost - group["lr"] * p.grad
                before = p.clone()
                p.add_(change)
                lost.copy_(change - (p - before))


@right(13)
def stochastic_rounding():
    model = net().bfloat16()
    optimizer = _StochasticSGD(model.parameters(), lr=1e-2)
    for _ in range(LONG):
        _half_step(model, optimizer)
        optimizer.step()


@right(13)
def kahan_summation():
    model = net().bfloat16()
    optimizer = _KahanSGD(model.parameters(), lr=1e-2)
    for _ in range(LONG):
        _half_step(model, optimizer)
        optimizer.step()


@right(13)
def fp32_master_weights():
    model = net().bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = AdamW(masters, lr=1e-5)
    for _ in range(LONG):
        x, y = batch()
        model.zero_grad()
        nn.functional.mse_loss(model(x.bfloat16()).float(), y).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)


# ---- 14 optimizer state --------------------------------------------------------------------------


@wrong(14)
def fp16_adam():
    model = net().half()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        _half_step(model, optimizer, FP16)
        optimizer.step()  # here


@wrong(14)
def weight_decay_that_rounds_to_nothing():
    model = net().bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for _ in range(STEPS):
        _half_step(model, optimizer)
        optimizer.step()  # here


class _EightBitAdam(Optimizer):
    """Half weights, quantised state and an fp32 step, as eight-bit optimizers have them."""

    def __init__(self, params, lr=1e-1):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["codes"] = torch.zeros_like(p, dtype=torch.uint8)
                    state["scale"] = torch.ones(())
                p.sub_(group["lr"] * p.grad.float().sign() * p.float().abs())
                state["codes"].copy_((p.grad.float().abs() * 10).clamp(0, 255))


@right(14)
def eight_bit_state_on_half_weights():
    model = net().bfloat16()
    optimizer = _EightBitAdam(model.parameters())
    for _ in range(STEPS):
        _half_step(model, optimizer)
        optimizer.step()


@right(14)
def fp32_weights_under_autocast():
    model = net()
    optimizer = AdamW(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        mse(model, *batch(), dtype=BF16).backward()
        optimizer.step()


# ---- 15 accumulators -----------------------------------------------------------------------------


@wrong(15)
def bf16_average_of_weights():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    average = [p.detach().bfloat16() for p in model.parameters()]
    for _ in range(STEPS):
        optimizer.zero_grad()
        mse(model, *batch(), dtype=BF16).backward()
        optimizer.step()
        with torch.no_grad():
            for a, p in zip(average, model.parameters(), strict=True):
                a.lerp_(p.bfloat16(), 1e-4)  # here


@wrong(15)
def fp16_running_sum():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    seen = torch.full((), 2048.0, dtype=FP16)
    for _ in range(STEPS):
        optimizer.zero_grad()
        mse(model, *batch(), dtype=BF16).backward()
        optimizer.step()
        seen += torch.ones((), dtype=FP16)  # here


@right(15)
def fp32_average_of_weights():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    average = [p.detach().clone() for p in model.parameters()]
    total = torch.zeros((), dtype=BF16)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mse(model, *batch(), dtype=BF16)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, list(model.parameters()), 1e-4)
            total += loss.bfloat16()


@right(15)
def residual_stream_in_place():
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for block in self.blocks:
                change = block(h)
                change *= 1e-4
                h = h + change
            return self.last(h)

    model = Blocks()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        mse(model, *batch(), dtype=BF16).backward()
        optimizer.step()


# ---- 18 accumulation -----------------------------------------------------------------------------


@wrong(18)
def micro_batches_not_averaged():
    model = net()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(4):
            mse(model, *batch(), dtype=BF16).backward()  # here
        optimizer.step()


@wrong(18)
def micro_batches_averaged_twice():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(4):
            loss = mse(model, *batch()) / 4
            s.scale(loss / 4).backward()  # here
        s.step(optimizer)
        s.update()


@right(18)
def micro_batches_averaged_summed_or_weighted():
    model = net()
    optimizer = Adam(model.parameters())
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        for _ in range(4):
            x, y = batch()
            with autocast(BF16):
                out = model(x).float()
            if step % 2:
                loss = nn.functional.mse_loss(out, y) / 4
            else:
                loss = nn.functional.mse_loss(out, y, reduction="sum") / torch.tensor(128.0)
            loss.backward()
        optimizer.step()


@right(18)
def two_losses_of_a_critic():
    critic = net()
    optimizer = Adam(critic.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        mse(critic, *batch(), dtype=BF16).backward()
        mse(critic, *batch(), dtype=BF16).backward()
        optimizer.step()


@right(18)
def a_loss_for_each_of_two_models():
    models = net(), net()
    optimizers = [Adam(model.parameters()) for model in models]
    for _ in range(STEPS):
        for model in models:
            mse(model, *batch(), dtype=BF16).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


# ---- 24 many sums in half ------------------------------------------------------------------------


@wrong(24)
def many_micro_batches_into_bf16_gradients():
    model = net().bfloat16()
    optimizer = SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(64):
            x, y = batch()
            (nn.functional.mse_loss(model(x.bfloat16()).float(), y) / 64).backward()  # here
        optimizer.step()


@right(24)
def many_micro_batches_into_fp32_gradients():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(64):
            (mse(model, *batch(), dtype=BF16) / 64).backward()
        optimizer.step()
