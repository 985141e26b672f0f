"""What a trial with loops of unseen shapes taught: weights moved by hand, own optimizers, sums by detours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

from precision.loops import right, wrong
from precision.loops.parts import BF16, FP16, autocast, batch, mse, net, scaler

STEPS = 6

# ---- weights and copies of weights that are moved by hand -----------------------------------------


def _by_hand(move: Callable[[nn.Parameter, float], object]) -> None:
    model, s = net(), scaler()
    for _ in range(STEPS):
        model.zero_grad()
        s.scale(mse(model, *batch())).backward()
        with torch.no_grad():
            for p in model.parameters():
                move(p, s.get_scale())


@wrong(3)
def weights_moved_without_an_optimizer_by_scaled_gradients():
    _by_hand(lambda p, scale: p.sub_(0.01 * p.grad))  # here


@right(3)
def weights_moved_without_an_optimizer():
    _by_hand(lambda p, scale: p.sub_(0.01 * p.grad / scale))


def _masters_by_hand(move: Callable[[Tensor, Tensor, float], object]) -> None:
    model, s = net().half(), scaler()
    masters = [p.detach().float() for p in model.parameters()]
    for _ in range(STEPS):
        x, y = batch()
        model.zero_grad()
        s.scale(nn.functional.mse_loss(model(x.half()).float(), y)).backward()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                move(master, p.grad.float(), s.get_scale())
                p.copy_(master)


@wrong(3)
def masters_without_an_optimizer_and_scaled_gradients():
    _masters_by_hand(lambda master, grad, scale: master.add_(grad, alpha=-1e-2))  # here


@right(3)
def masters_without_an_optimizer():
    _masters_by_hand(lambda master, grad, scale: master.add_(grad / scale, alpha=-1e-2))


def _masters_in_an_optimizer(finish: Callable[[Optimizer, list[Tensor]], object]) -> None:
    model, s = net().half(), scaler(init_scale=128.0)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = SGD(masters, lr=1e-5)
    for _ in range(STEPS):
        x, y = batch()
        model.zero_grad()
        s.scale(nn.functional.mse_loss(model(x.half()).float(), y)).backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            if master.grad is None:
                master.grad = p.grad.float()
            else:
                master.grad.copy_(p.grad)
        finish(optimizer, masters)
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)


@wrong(1)
def masters_clipped_before_they_are_divided():
    def finish(optimizer, masters):
        clip_grad_norm_(masters, 1.0)  # here
        torch._foreach_div_([master.grad for master in masters], 128.0)

    _masters_in_an_optimizer(finish)


@right(1)
def masters_clipped_after_they_are_divided():
    def finish(optimizer, masters):
        torch._foreach_div_([master.grad for master in masters], 128.0)
        clip_grad_norm_(masters, 1.0)

    _masters_in_an_optimizer(finish)


@wrong(1)
def clipped_along_with_gradients_that_no_optimizer_unscales():
    model, s = net(), scaler()
    optimizer = SGD(model[2].parameters(), lr=0.1)
    for _ in range(STEPS):
        model.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)  # here
        s.step(optimizer)
        s.update()


@right(1)
def clipped_without_gradients_that_no_optimizer_unscales():
    model, s = net(), scaler()
    optimizer = SGD(model[2].parameters(), lr=0.1)
    for _ in range(STEPS):
        model.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.unscale_(optimizer)
        clip_grad_norm_(model[2].parameters(), 1.0)
        s.step(optimizer)
        s.update()


@right(2)
def gradients_of_a_replica_are_added():
    model, s = net(), scaler()
    replica = copy.deepcopy(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        replica.zero_grad()
        replica.load_state_dict(model.state_dict())
        for one in (model, replica):
            s.scale(mse(one, *batch()) / 2).backward()
        for p, q in zip(model.parameters(), replica.parameters(), strict=True):
            p.grad.add_(q.grad)
        s.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        s.step(optimizer)
        s.update()


@right(1)
def unscaled_by_the_copy_of_a_quotient():
    model, s = net(), scaler()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        for p in model.parameters():
            p.grad.copy_(p.grad / s.get_scale())
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


# ---- half-precision weights and states under optimizers of one's own --------------------------------


def _half_step(model: nn.Module) -> None:
    x, y = batch()
    model.zero_grad()
    nn.functional.mse_loss(model(x.bfloat16()).float(), y).backward()


def _own(move: Callable[[nn.Parameter, dict[str, Any]], None], steps: int = 33) -> None:
    class Own(Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    move(p, self.state[p])

    model = net(64).bfloat16()
    optimizer = Own(model.parameters(), {})
    for _ in range(steps):
        _half_step(model)
        optimizer.step()


@wrong(13)
def own_descent_loses_its_updates():
    def move(p, state):
        p.add_(p.grad, alpha=-1e-6)  # here

    _own(move)


@wrong(13)
def own_adam_with_fp32_state_loses_its_updates():
    def move(p, state):
        grad = p.grad.float()
        first, second = (state.setdefault(name, torch.zeros_like(grad)) for name in ("first", "second"))
        first.lerp_(grad, 0.1)
        second.mul_(0.999).addcmul_(grad, grad, value=1e-3)
        p.addcdiv_(first.to(p.dtype), second.sqrt().add(1e-8).to(p.dtype), value=-1e-6)  # here

    _own(move)


@wrong(13)
def weights_without_an_optimizer_lose_their_updates():
    model = net().bfloat16()
    for _ in range(33):
        _half_step(model)
        with torch.no_grad():
            for p in model.parameters():
                p -= 1e-6 * p.grad  # here


@wrong(15)
def own_second_moment_never_decays():
    def move(p, state):
        second = state.setdefault("second", torch.ones_like(p))
        second.mul_(0.999).addcmul_(p.grad, p.grad, value=1e-3)  # here
        p.add_(p.grad / (second.sqrt() + 1e-3), alpha=-1e-2)

    _own(move, steps=8)


@right(13)
def own_optimizer_that_rounds_stochastically():
    def move(p, state):
        bits = (p.float() - 1e-5 * p.grad.float()).view(torch.int32)
        bits = bits + torch.randint_like(bits, 0, 1 << 16)
        p.copy_((bits & -65536).view(torch.float32))

    _own(move)


@right(13)
def own_optimizer_that_compensates():
    def move(p, state):
        lost = state.setdefault("lost", torch.zeros_like(p))
        lost.add_(p.grad, alpha=-1e-4)
        old = p.detach().clone()
        p.add_(lost)
        lost.add_(old.sub_(p))

    _own(move)


@right(13)
def weights_that_compensate_by_way_of_new_tensors():
    model = net().bfloat16()
    losts = [torch.zeros_like(p) for p in model.parameters()]
    for _ in range(33):
        _half_step(model)
        with torch.no_grad():
            for p, lost in zip(model.parameters(), losts, strict=True):
                change = lost - 1e-4 * p.grad
                new = p + change
                lost.copy_(change - (new - p))
                p.copy_(new)
                p.grad = None


@right(13)
def own_optimizer_with_masters():
    def move(p, state):
        master = state.setdefault("master", p.detach().float())
        master.sub_(p.grad.float() * 1e-5)
        p.copy_(master)

    _own(move)


@right(13)
def own_momentum_that_moves():
    def move(p, state):
        velocity = state.setdefault("velocity", torch.zeros_like(p))
        velocity.mul_(0.9).add_(p.grad)
        p.add_(velocity, alpha=-0.1)

    _own(move)


@right(13)
def weights_that_are_normalised_after_each_step():
    model = net(32).bfloat16()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(33):
        _half_step(model)
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 / p.norm())
                p.sub_(p.mean() * 1e-3)


# ---- averages by detours ----------------------------------------------------------------------------


def _averaged(update: Callable[[Tensor, Tensor], object], steps: int = STEPS) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    averages = [p.detach().bfloat16() for p in model.parameters()]
    for _ in range(steps):
        optimizer.zero_grad()
        mse(model, *batch(), dtype=BF16).backward()
        optimizer.step()
        with torch.no_grad():
            for average, p in zip(averages, model.parameters(), strict=True):
                update(average, p)


@wrong(15)
def average_by_way_of_fp32():
    _averaged(lambda a, p: a.copy_(a * 0.9999 + p * 1e-4))  # here


@wrong(15)
def average_into_itself():
    _averaged(lambda a, p: torch.lerp(a, p.bfloat16(), 1e-4, out=a))  # here


@wrong(15)
def average_by_a_fused_product():
    _averaged(lambda a, p: a.mul_(0.9999).addcmul_(p.bfloat16(), torch.ones_like(a), value=1e-4))  # here


@right(15)
def average_that_compensates():
    lost: dict[int, Tensor] = {}

    def update(a, p):
        rest = lost.setdefault(id(a), torch.zeros_like(a))
        rest.add_((p - a.float()).mul(1e-3).bfloat16())
        old = a.clone()
        a.add_(rest)
        rest.add_(old.sub_(a))

    _averaged(update, steps=12)


@right(15)
def average_that_rounds_stochastically():
    def update(a, p):
        bits = a.float().lerp(p, 1e-3).view(torch.int32)
        bits = bits + torch.randint_like(bits, 0, 1 << 16)
        a.copy_((bits & -65536).view(torch.float32))

    _averaged(update, steps=12)


@right(15)
def vectors_that_are_normalised_again_and_again():
    _averaged(lambda a, p: a.div_(a.norm()))


# ---- sums, differences and products in half precision -------------------------------------------------


class _Between(nn.Module):
    """Two layers, and a function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(16, 16), nn.Linear(16, 16), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))  # type: ignore[no-any-return]


def _train(model: nn.Module, x: Tensor, dtype: torch.dtype) -> None:
    optimizer, s = AdamW(model.parameters()), scaler(enabled=dtype == FP16)
    for _ in range(4):
        optimizer.zero_grad()
        with autocast(dtype):
            loss = model(x).float().square().mean()
        s.scale(loss).backward()
        s.step(optimizer)
        s.update()


@wrong(12)
def variance_as_a_difference_of_squares():
    def norm(x: Tensor) -> Tensor:
        x = torch.tanh(x).bfloat16() + 100
        variance = x.pow(2).mean(-1, keepdim=True) - x.mean(-1, keepdim=True).pow(2)  # here
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(variance.abs() + 1e-5)

    _train(_Between(norm), torch.randn(8, 16), BF16)


@wrong(12)
def squares_by_a_product():
    def norm(x: Tensor) -> Tensor:
        x = x.half() * 500
        return x / ((x * x).mean(-1, keepdim=True) + 1e-5).sqrt()  # here

    _train(_Between(norm), torch.randn(8, 16), FP16)


@wrong(12)
def logarithm_of_what_a_sigmoid_leaves():
    def other(x: Tensor) -> Tensor:
        return torch.log(1 - torch.sigmoid(40 * x.half()))  # here

    _train(_Between(other), 3 * torch.randn(8, 16), FP16)


@right(12)
def norms_and_gates_by_hand():
    def norm(x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        centred = x - x.mean(-1, keepdim=True)
        x = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        gates = torch.sigmoid(x).sqrt() * torch.log(torch.softmax(x, -1) + 1e-4)
        return x * gates / x.std(-1, keepdim=True)

    _train(_Between(norm), torch.randn(8, 16), BF16)


@right(12)
def probabilities_out_of_their_logarithms():
    def entropy(x: Tensor) -> Tensor:
        logarithms = torch.log_softmax(4 * x, -1)
        return logarithms.exp() * logarithms

    _train(_Between(entropy), torch.randn(8, 16), BF16)


class _Attention(nn.Module):
    def __init__(self, masked: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.query, self.masked = nn.Linear(16, 16), masked

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        scores = self.masked(query @ x.to(query.dtype).transpose(1, 2))
        return torch.softmax(scores, -1) @ x.to(query.dtype)


@wrong(30)
def the_second_mask_overflows():
    def masked(scores: Tensor) -> Tensor:
        padding = torch.zeros(1, 1, 8, dtype=scores.dtype)
        padding[..., 6:] = -6e4
        scores = scores + padding
        return scores + torch.ones(8, 8).triu(1).to(scores.dtype) * -6e4  # here

    _train(_Attention(masked), torch.randn(2, 8, 16), FP16)


@wrong(16)
def distances_of_positions_that_merged():
    def biased(scores: Tensor) -> Tensor:
        positions = torch.arange(scores.shape[-1], dtype=scores.dtype)  # here
        return scores - 0.0625 * (positions[None] - positions[:, None]).abs()

    _train(_Attention(biased), torch.randn(1, 600, 16), BF16)


@right(16)
def distances_of_whole_positions():
    def biased(scores: Tensor) -> Tensor:
        positions = torch.arange(scores.shape[-1])
        return scores - 0.0625 * (positions[None] - positions[:, None]).abs()

    _train(_Attention(biased), torch.randn(1, 600, 16), BF16)


# ---- weights that keep elsewhere what rounding takes -------------------------------------------------


def _long_by_hand(move: Callable[[nn.Parameter, Tensor], object]) -> None:
    model = net().bfloat16()
    kept = [torch.zeros_like(p) for p in model.parameters()]
    for _ in range(104):  # as far as the next close look
        x, y = batch()
        model.zero_grad()
        nn.functional.mse_loss(model(x.bfloat16()).float(), y).backward()
        with torch.no_grad():
            for p, rest in zip(model.parameters(), kept, strict=True):
                move(p, rest)


@right(15)
def weights_in_two_halves():
    def move(p: nn.Parameter, rest: Tensor) -> None:
        whole = p.float() + rest.float() - 1e-5 * p.grad.float()
        p.copy_(whole)
        rest.copy_(whole - p.float())

    _long_by_hand(move)


@right(15)
def updates_that_are_saved_up():
    def move(p: nn.Parameter, rest: Tensor) -> None:
        rest.sub_(p.grad, alpha=1e-5)
        old = p.clone()
        p.add_(rest)
        rest.sub_(p - old)

    _long_by_hand(move)


def _averages(move: Callable[[Tensor, Tensor, Tensor], object]) -> None:
    model = net()
    optimizer = AdamW(model.parameters(), 1e-3)
    averages = [p.detach().bfloat16() for p in model.parameters()]
    kept = [torch.zeros_like(average) for average in averages]
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for average, rest, p in zip(averages, kept, model.parameters(), strict=True):
                move(average, rest, p)


@right(15)
def averages_in_two_halves():
    def move(average: Tensor, rest: Tensor, p: Tensor) -> None:
        whole = (average.float() + rest.float()) * 0.999 + p * 0.001
        average.copy_(whole)
        rest.copy_(whole - average.float())

    _averages(move)


@right(15)
def averages_whose_changes_are_saved_up():
    def move(average: Tensor, rest: Tensor, p: Tensor) -> None:
        rest.add_((p.bfloat16() - average) * 0.001)
        old = average.clone()
        average.add_(rest)
        rest.sub_(average - old)

    _averages(move)


@wrong(15)
def averages_less_a_part_of_themselves():
    def move(average: Tensor, rest: Tensor, p: Tensor) -> None:
        average.copy_(average - average * 1e-4 + p.bfloat16() * 1e-4)  # here

    _averages(move)


@right(15)
def rounding_with_noise():
    def move(p: nn.Parameter, rest: Tensor) -> None:
        noise = (torch.rand_like(p, dtype=torch.float32) - 0.5) * p.abs().float() * 2**-8
        p.copy_(p.float() - 1e-5 * p.grad.float() + noise)

    _long_by_hand(move)
