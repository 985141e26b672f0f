"""What is stored and computed in half precision, in other shapes: averages, optimizers, positions, losses."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from precision.loops import right, wrong
from precision.loops.parts import BF16, FP16, autocast, batch, mse, net, scaler

STEPS = 6


def _train(model: nn.Module, after: Any = None, dtype: torch.dtype = BF16, steps: int = STEPS) -> None:
    optimizer, s = SGD(model.parameters(), lr=0.05), scaler(enabled=dtype == FP16, init_scale=1024.0)
    for _ in range(steps):
        optimizer.zero_grad()
        s.scale(mse(model, *batch(), dtype=dtype)).backward()
        s.step(optimizer)
        s.update()
        if after is not None:
            after()


def _half(model: nn.Module) -> nn.Module:
    """A copy in bf16 that is not trained."""
    return copy.deepcopy(model).bfloat16().requires_grad_(False)


# ---- averages of weights --------------------------------------------------------------------------


@wrong(15)
def average_through_data():
    model = net()
    average = _half(model)

    def update():
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.data.mul_(0.9999).add_(p.data.bfloat16(), alpha=1e-4)  # here

    _train(model, update)


@wrong(15)
def average_over_the_state_dict():
    model = net()
    average = _half(model)

    def update():
        new = model.state_dict()
        for name, value in average.state_dict().items():
            value.mul_(0.9999).add_(new[name].bfloat16(), alpha=1e-4)  # here

    _train(model, update)


@wrong(15)
def averaged_model_of_pytorch():
    model = net().bfloat16()
    optimizer = SGD(model.parameters(), lr=0.5)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.bfloat16()).float(), y).backward()
        optimizer.step()
        average.update_parameters(model)  # here


@wrong(15)
def average_out_of_place():
    model = net()
    shadow = {name: p.detach().bfloat16() for name, p in model.named_parameters()}

    def update():
        for name, p in model.named_parameters():
            shadow[name] = 0.9999 * shadow[name] + 1e-4 * p.detach().bfloat16()  # here

    _train(model, update)


@wrong(15)
def average_moved_by_its_distance():
    model = net()
    average = _half(model)

    @torch.no_grad()
    def update():
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.sub_((a - p.bfloat16()) * 1e-4)  # here

    _train(model, update)


@wrong(15)
def average_with_a_distance_added():
    model = net()
    average = _half(model)

    @torch.no_grad()
    def update():
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a += 1e-4 * (p.bfloat16() - a)  # here

    _train(model, update)


@right(15)
def distances_from_an_average_that_moves():
    model = net()
    average = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update():
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            (a.bfloat16() - p.bfloat16()).abs().sum()
            a.lerp_(p, 1e-4)

    _train(model, update)


@wrong(15)
def average_cloned_into_a_dictionary():
    class Average:
        def __init__(self, model: nn.Module) -> None:
            self.model = model
            self.shadow = {n: p.data.bfloat16().clone() for n, p in model.named_parameters()}

        def update(self) -> None:
            raise NotImplementedError

    class Own(Average):
        def update(self) -> None:
            for name, p in self.model.named_parameters():
                new = (1.0 - 0.999) * p.data.bfloat16() + 0.999 * self.shadow[name]  # here
                self.shadow[name] = new.clone()

    model = net()
    _train(model, Own(model).update)


@wrong(15)
def average_copied_into_its_parameters():
    model = net()
    average = _half(model)

    @torch.no_grad()
    def update():
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.copy_(a * 0.9999 + p.bfloat16() * 1e-4)  # here

    _train(model, update)


@wrong(15)
def average_by_foreach():
    model = net()
    average = _half(model)

    @torch.no_grad()
    def update():
        mine = [a.detach() for a in average.parameters()]
        theirs = [p.detach().bfloat16() for p in model.parameters()]
        torch._foreach_lerp_(mine, theirs, 1e-4)  # here

    _train(model, update)


@wrong(15)
def average_by_lerp_out_of_place():
    model = net()
    average = [p.detach().bfloat16() for p in model.parameters()]

    def update():
        for i, p in enumerate(model.parameters()):
            average[i] = torch.lerp(average[i], p.detach().bfloat16(), 1e-4)  # here

    _train(model, update)


@wrong(15)
def running_loss_in_bf16():
    model = net()
    total = torch.full((), 1000.0, dtype=BF16)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mse(model, *batch(), dtype=BF16)
        loss.backward()
        optimizer.step()
        total += loss.detach().bfloat16()  # here


@wrong(15)
def momentum_of_a_queue_encoder():
    query = net()
    key = _half(query)

    @torch.no_grad()
    def update():
        for k, q in zip(key.parameters(), query.parameters(), strict=True):
            k.data = k.data * 0.9999 + q.data.bfloat16() * 1e-4  # here

    _train(query, update)


@right(15)
def averages_in_fp32():
    model = net()
    average = copy.deepcopy(model).requires_grad_(False)
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    swa = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9999))

    @torch.no_grad()
    def update():
        swa.update_parameters(model)
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.data.mul_(0.9999).add_(p.data, alpha=1e-4)
        for name, p in model.named_parameters():
            shadow[name] = 0.9999 * shadow[name] + 1e-4 * p

    _train(model, update)


@right(15)
def averages_in_bf16_that_move():
    model = net()
    average = _half(model)
    shadow = {name: torch.zeros_like(p, dtype=BF16) for name, p in model.named_parameters()}

    @torch.no_grad()
    def update():
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.data.mul_(0.5).add_(p.data.bfloat16(), alpha=0.5)
        for name, p in model.named_parameters():
            shadow[name] = 0.5 * shadow[name] + 0.5 * p.bfloat16()

    _train(model, update)


@right(15)
def weights_copied_to_a_half_model_for_inference():
    model = net()
    deployed = _half(model)

    @torch.no_grad()
    def update():
        for d, p in zip(deployed.parameters(), model.parameters(), strict=True):
            d.copy_(p)
        deployed(batch()[0].bfloat16())

    _train(model, update)


@right(15)
def a_sum_that_starts_anew_each_step():
    model = net()

    def update():
        total = torch.zeros((), dtype=BF16)
        for _ in range(4):
            total += model(batch()[0]).detach().abs().mean().bfloat16()

    _train(model, update)


@right(15)
def predictions_mixed_without_gradients():
    model, other = net(), _half(net())

    @torch.no_grad()
    def update():
        x = batch()[0].bfloat16()
        torch.softmax(0.999 * other(x) + 0.001 * other(x), -1)

    _train(model, update)


@right(15)
def a_cache_that_is_written_to():
    model, cache = net(), torch.zeros(16, 4, dtype=BF16)

    @torch.no_grad()
    def update():
        cache[:8].copy_(model(batch()[0]))
        cache.roll(8, 0)

    _train(model, update)


# ---- optimizers -----------------------------------------------------------------------------------


@wrong(13)
def a_short_run_of_bf16_weights():
    model = net().bfloat16()
    optimizer = SGD(model.parameters(), lr=1e-5)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.bfloat16()).float(), y).backward()
        optimizer.step()  # here


@right(13)
def a_short_run_of_bf16_weights_that_move():
    model = net().bfloat16()
    optimizer = SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.bfloat16()).float(), y).backward()
        optimizer.step()


class _Own(Optimizer):
    """Adam's direction without state, and a decay."""

    def __init__(self, params: Any, lr: float = 0.05, decay: float = 1e-5) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})


@wrong(14)
def decay_that_rounds_to_nothing_in_ones_own_optimizer():
    class Own(_Own):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(1 - group["lr"] * group["decay"])  # here
                    p.add_(p.grad.sign(), alpha=-group["lr"])

    model = net().bfloat16()
    optimizer = Own(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.bfloat16()).float(), y).backward()
        optimizer.step()


@wrong(14)
def decay_that_rounds_to_nothing_through_data():
    class Own(_Own):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.mul_(1 - group["lr"] * group["decay"])  # here
                    p.data.add_(p.grad.data, alpha=-group["lr"])

    model = net().bfloat16()
    optimizer = Own(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.bfloat16()).float(), y).backward()
        optimizer.step()


@right(14)
def decay_in_fp32_in_ones_own_optimizer():
    class Own(_Own):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    wide = self.state[p].setdefault("master", p.float())
                    wide.mul_(1 - group["lr"] * group["decay"])
                    wide.add_(p.grad.float(), alpha=-group["lr"])
                    p.copy_(wide)

    model = net().bfloat16()
    optimizer = Own(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.bfloat16()).float(), y).backward()
        optimizer.step()


@wrong(14)
def fp16_rmsprop():
    model = net().half()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        (64 * nn.functional.mse_loss(model(x.half()).float(), y)).backward()
        optimizer.step()  # here


# ---- positions, steps and tables ------------------------------------------------------------------


class _Timed(nn.Module):
    """A model that is told the time step of each sample."""

    def __init__(self, features: int = 1) -> None:
        super().__init__()
        self.inner, self.time = nn.Linear(8, 4), nn.Linear(features, 4)


@wrong(16)
def sixteen_time_steps():
    class Model(_Timed):
        def forward(self, x: Tensor) -> Tensor:
            t = torch.randint(300, 1000, (16, 1)).float()
            return self.inner(x) + self.time(t)[: len(x)]  # here

    _train(Model())


@wrong(16)
def time_steps_cast_by_hand():
    class Model(_Timed):
        def forward(self, x: Tensor) -> Tensor:
            t = torch.randint(300, 1000, (16,)).to(BF16)[:, None]  # here
            frequencies = torch.exp(-torch.arange(4, dtype=BF16))
            return self.inner(x) + torch.sin(t * frequencies)[: len(x)]

    _train(Model())


@wrong(16)
def positions_of_three_hundred_tokens():
    class Model(_Timed):
        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(300)
            inverse = 1.0 / 100 ** (torch.arange(4) / 4)
            freqs = positions[:, None].float() @ inverse[None]  # here
            return self.inner(x) + freqs.sin()[: len(x)]

    _train(Model())


@wrong(16)
def rotary_positions_of_one_sample():
    class Model(_Timed):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inverse", 1.0 / 100 ** (torch.arange(4) / 4))

        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(1500)[None, None].float()
            freqs = self.inverse[None, :, None] @ positions  # here
            return self.inner(x) + freqs.transpose(1, 2).cos()[0, : len(x)]

    _train(Model())


@wrong(16)
def rotary_positions_of_several_samples():
    class Model(_Timed):
        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(600).expand(2, 1, 600).float()
            inverse = (1.0 / 100 ** (torch.arange(4) / 4)).expand(2, 4).unsqueeze(-1)
            freqs = inverse @ positions  # here
            return self.inner(x) + freqs.transpose(1, 2).sin()[0, : len(x)]

    _train(Model())


@wrong(16)
def positions_counted_in_bf16():
    class Model(_Timed):
        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(1000, dtype=BF16)  # here
            angles = positions[:, None] * torch.exp(-torch.arange(4, dtype=BF16))
            return self.inner(x) + angles.sin()[: len(x)]

    _train(Model())


@wrong(16)
def positions_that_merge_in_fp16():
    class Model(_Timed):
        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(5000)[:, None].half()  # here
            angles = positions * torch.exp(-torch.arange(4, dtype=FP16))
            return self.inner(x) + angles.sin()[: len(x)]

    _train(Model(), dtype=FP16)


@right(16)
def positions_that_fit():
    class Model(_Timed):
        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(256)[:, None].float()
            freqs = positions @ (1.0 / 100 ** (torch.arange(4) / 4))[None]
            t = torch.randint(0, 250, (16, 1)).float()
            return self.inner(x) + freqs.sin()[: len(x)] + self.time(t)[: len(x)]

    _train(Model())


@right(16)
def pixels_and_token_counts():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.embed, self.last = nn.Conv2d(3, 4, 3), nn.Embedding(1000, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            image = torch.randint(0, 256, (8, 3, 8, 8)).float()
            tokens = torch.randint(0, 1000, (8, 700))
            lengths = torch.randint(300, 700, (8, 1))
            pooled = self.embed(tokens).bfloat16().sum(1) / lengths.to(BF16)
            return self.last(self.conv(image).mean((2, 3)) / 1000 + pooled)

    _train(Model())


@right(16)
def scaled_steps_and_normalised_coordinates():
    class Model(_Timed):
        def forward(self, x: Tensor) -> Tensor:
            t = torch.randint(0, 1000, (16, 1)) / 1000
            grid = torch.linspace(-1, 1, 500)[:, None]
            return self.inner(x) + self.time(t)[: len(x)] + self.time(grid)[: len(x)]

    _train(Model())


@right(16)
def wide_features_of_whole_numbers():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.BatchNorm1d(12), nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            table = torch.randint(0, 5000, (8, 12)).float()
            return self.last(self.norm(table))

    _train(Model())


@right(16)
def time_steps_in_an_island():
    class Model(_Timed):
        def forward(self, x: Tensor) -> Tensor:
            with autocast(enabled=False):
                t = torch.randint(0, 1000, (16, 1)).float()
                angles = torch.sin(t * torch.exp(-torch.arange(4.0)))
            return self.inner(x) + angles[: len(x)]

    _train(Model())


# ---- arithmetic and losses ------------------------------------------------------------------------


class _Scaled(nn.Module):
    """Hands large values to a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(8, 16), layer, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(300.0 * (self.first(x) + 2.0)))  # type: ignore[no-any-return]


@wrong(12)
def variance_by_hand():
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.half()
            centred = x - x.mean(-1, keepdim=True)
            square = (3 * centred).square()  # here
            return centred / (square.mean(-1, keepdim=True) + 1e-5).sqrt()

    _train(_Scaled(Norm()), dtype=FP16)


@wrong(12)
def exponential_by_hand():
    class Soft(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            e = torch.exp(x.half() / 30)  # here
            return torch.nan_to_num(e / e.sum(-1, keepdim=True))

    _train(_Scaled(Soft()), dtype=FP16)


@right(12)
def norms_and_softmax_of_pytorch():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.group = nn.LayerNorm(16), nn.GroupNorm(2, 16)

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.group(self.norm(x.half() / 8)), -1) * 16

    _train(_Scaled(Model()), dtype=FP16)


@wrong(30)
def a_mask_of_the_smallest_number_added_twice():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            scores = h @ h.transpose(-1, -2)
            mask = torch.ones(8, 8).triu(1).to(scores.dtype) * torch.finfo(scores.dtype).min
            scores = scores + mask + mask  # here
            return (torch.softmax(scores, -1).to(h.dtype) @ h)[:, :4]

    _train(Attention(), dtype=FP16)


@right(30)
def a_mask_filled_once():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            scores = h @ h.transpose(-1, -2)
            scores = scores.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -10000.0)
            return (torch.softmax(scores, -1).to(h.dtype) @ h)[:, :4]

    _train(Attention(), dtype=FP16)


@wrong(25)
def metrics_in_a_function_without_a_region():
    def evaluate(model: nn.Module) -> Tensor:
        model.eval()
        with torch.inference_mode():
            out = model(batch()[0])  # here
        model.train()
        return out.abs().mean()

    model = net()
    _train(model, lambda: evaluate(model))


@right(25)
def metrics_of_another_model():
    model, teacher = net(), net()

    def evaluate() -> None:
        teacher.eval()
        with torch.no_grad():
            teacher(batch()[0])

    _train(model, evaluate)


@right(31)
def norms_of_scaled_gradients_that_are_only_logged():
    model, s, log = net(), scaler(), []
    optimizer = AdamW(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        log.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
        s.step(optimizer)
        s.update()


@wrong(31)
def norm_of_activations_in_fp16():
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            norm = (40 * x.half()).norm(dim=-1, keepdim=True)  # here
            return x / norm.float()

    _train(_Scaled(Norm()), dtype=FP16)


@wrong(24)
def a_hundred_micro_batches_in_bf16():
    model = net().bfloat16()
    optimizer = Adam(model.parameters(), lr=0.1, betas=(0.5, 0.9))
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(100):
            x, y = batch(2)
            (nn.functional.mse_loss(model(x.bfloat16()).float(), y) / 100).backward()  # here
        optimizer.step()


@wrong(22)
def only_the_large_layers_in_half():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (
                nn.Linear(8, 16).bfloat16(),
                nn.Linear(16, 16).bfloat16(),
                nn.Linear(16, 4),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x)))

    model = Model()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        with autocast(BF16):  # here
            out = model(x)
        nn.functional.mse_loss(out.float(), y).backward()
        optimizer.step()


@right(22)
def a_half_model_without_autocast():
    model = net().bfloat16()
    optimizer = SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.bfloat16()).float(), y).backward()
        optimizer.step()


@wrong(26)
def a_logarithm_of_zero():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).float().relu().log()  # here

    model = Model()
    optimizer = SGD(model.parameters(), lr=0.0)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


@wrong(17)
def a_function_that_casts_back():
    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return torch.mm(x, w)  # here

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return torch.mm(g.float(), w.float().t()), torch.mm(x.float().t(), g.float())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            return Linear.apply(x, self.w)

    _train(Model())


@wrong(21)
def a_warmup_that_loses_steps():
    model, s = net(), scaler(init_scale=2.0**40)
    optimizer = AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    for _ in range(8):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)
        s.update()
        schedule.step()  # here


@wrong(29)
def a_loss_that_is_always_infinite():
    model, s = net(), scaler()
    optimizer = AdamW(model.parameters())
    for _ in range(8):
        optimizer.zero_grad()
        loss = mse(model, *batch()) / torch.zeros(())
        s.scale(loss).backward()  # here
        s.step(optimizer)
        s.update()
