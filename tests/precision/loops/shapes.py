"""The scale's protocol in other shapes: classes, functions, hooks, old idioms, several models, threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adam, AdamW, Optimizer

from precision.loops import right, wrong
from precision.loops.parts import BF16, FP16, autocast, batch, mse, net, scaler

STEPS = 5


class Trainer:
    """A training loop as many projects have it; its parts are replaced one by one."""

    dtype = FP16
    accumulate = 1

    def __init__(self, rate: float = 1e-3, **kw: Any) -> None:
        self.model, self.scaler = net(), scaler(**kw)
        self.optimizer: Optimizer = AdamW(self.model.parameters(), lr=rate)

    def loss(self) -> Tensor:
        return mse(self.model, *batch(), dtype=self.dtype) / self.accumulate

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def backward(self) -> None:
        self.scaler.scale(self.loss()).backward()

    def finish(self) -> None:
        self.scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def fit(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            self.clear()
            for _ in range(self.accumulate):
                self.backward()
            self.finish()


# ---- gradients cleared, written and used in the old ways -----------------------------------------


@right(6)
def cleared_through_data():
    class Old(Trainer):
        def clear(self):
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.data.zero_()

    Old().fit(8)


@right(6)
def cleared_by_a_product_through_data():
    class Old(Trainer):
        def clear(self):
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.data.mul_(0)

    Old().fit(8)


@right(6)
def cleared_by_new_data():
    class Old(Trainer):
        def clear(self):
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.data = torch.zeros_like(p.grad)

    Old().fit(8)


@right(6)
def cleared_by_fill_and_copy():
    class Old(Trainer):
        def clear(self):
            for i, p in enumerate(self.model.parameters()):
                if p.grad is None:
                    continue
                if i % 2:
                    p.grad.data.fill_(0.0)
                else:
                    p.grad.data.copy_(torch.zeros_like(p))

    Old().fit(8)


@right(6)
def cleared_by_foreach():
    class Old(Trainer):
        def clear(self):
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            if grads:
                torch._foreach_zero_(grads)

    Old().fit(8)


@right(3)
def unscaled_by_hand_through_data():
    class Old(Trainer):
        def finish(self):
            for p in self.model.parameters():
                p.grad.data.div_(self.scaler.get_scale())
            self.optimizer.step()

    Old().fit()


@right(1)
def unscaled_by_hand_through_data_then_clipped():
    class Old(Trainer):
        def finish(self):
            inverse = 1.0 / self.scaler.get_scale()
            for p in self.model.parameters():
                p.grad.data.mul_(inverse)
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()

    Old().fit()


@right(4)
def gradients_of_an_evolution_strategy():
    model = net()
    optimizer = Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(8):
        for p in model.parameters():
            p.grad.data.copy_(torch.randn_like(p))
        optimizer.step()


@right(4)
def gradients_written_in_place_between_steps():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.01)
    for _ in range(8):
        optimizer.zero_grad()
        mse(model, *batch(), dtype=BF16).backward()
        optimizer.step()
        for p in model.parameters():
            p.grad.data.normal_(0, 1e-3)
        optimizer.step()


@right(6)
def hand_scaled_by_the_scalers_scale():
    class Hand(Trainer):
        def backward(self):
            self.scaler.scale(torch.ones(()))
            (self.loss() * self.scaler.get_scale()).backward()

    Hand().fit()


@right(7)
def scale_given_to_backward():
    model = net()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        mse(model, *batch()).backward(torch.tensor(1024.0))
        for p in model.parameters():
            p.grad.div_(1024.0)
        optimizer.step()


@right(3)
def hooks_that_unscale():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for p in model.parameters():
        p.register_hook(lambda g: g / s.get_scale())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        optimizer.step()


@right(3)
def post_accumulate_hooks_that_unscale():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())

    def hook(p):
        p.grad.div_(s.get_scale())

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@right(2)
def hooks_that_only_look_or_commute():
    model, s, seen = net(), scaler(), []
    optimizer = Adam(model.parameters())

    def double(p):
        p.grad.mul_(2.0)

    for i, p in enumerate(model.parameters()):
        p.register_hook(lambda g: seen.append(g.detach().abs().max()))
        if i % 2:
            p.register_hook(lambda g: 0.5 * g)
            p.register_post_accumulate_grad_hook(double)
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)
        s.update()


@right(2)
def hooks_that_clip_plain_gradients():
    model = net()
    optimizer = Adam(model.parameters())

    def tidy(p):
        p.grad.nan_to_num_()

    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-1, 1))
        p.register_post_accumulate_grad_hook(tidy)
    for _ in range(STEPS):
        optimizer.zero_grad()
        mse(model, *batch(), dtype=BF16).backward()
        optimizer.step()


@wrong(2)
def hooks_that_clip_scaled_gradients():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-1, 1))  # here
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)
        s.update()


@wrong(2)
def post_accumulate_hooks_that_clip_scaled_gradients():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())

    def hook(p):
        p.grad.clamp_(-0.1, 0.1)  # here

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)
        s.update()


@wrong(1)
def norm_clipped_in_a_post_accumulate_hook():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())

    def hook(p):
        clip_grad_norm_([p], 1.0)  # here

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)
        s.update()


@wrong(2)
def nan_to_num_with_out():
    class Own(Trainer):
        def finish(self):
            for p in self.model.parameters():
                torch.nan_to_num(p.grad, nan=0.0, out=p.grad)  # here
            self.scaler.step(self.optimizer)
            self.scaler.update()

    run_at(Own)


def run_at(kind: type[Trainer], **kw: Any) -> None:
    kind(**kw).fit()


@wrong(2)
def clamp_with_out():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        for p in model.parameters():
            torch.clamp(p.grad, -1, 1, out=p.grad)  # here
        s.step(optimizer)
        s.update()


@wrong(1)
def coefficient_of_the_norm_into_new_tensors():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        n = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
        for p in model.parameters():
            p.grad = p.grad * (1 / n)  # here
        s.step(optimizer)
        s.update()


@wrong(1)
def coefficient_of_the_norm_in_place():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        norm = float(sum(p.grad.pow(2).sum() for p in model.parameters())) ** 0.5
        for p in model.parameters():
            p.grad.mul_(0.5 / norm)  # here
        s.step(optimizer)
        s.update()


@right(1)
def norm_logged_and_a_constant_factor():
    model, s, log = net(), scaler(), []
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        log.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
        for p in model.parameters():
            p.grad.mul_(0.37)
        s.step(optimizer)
        s.update()


@wrong(1)
def hand_made_scale_clipped_before_it_is_divided_out():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (mse(model, *batch()) * 1024.0).backward()
        clip_grad_norm_(model.parameters(), 1.0)  # here
        for p in model.parameters():
            p.grad.div_(1024.0)
        optimizer.step()


def _multiplied(scale_first: bool, scale: Callable[[Tensor, float], object]) -> None:
    """A multiplier is kept beside the gradients, and applied before the clipping or after it."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (mse(model, *batch()) * 128.0).backward()
        gradients = [p.grad for p in model.parameters()]
        if scale_first:
            torch._foreach_mul_(gradients, 1 / 128.0)
        norm = torch.stack([g.norm() for g in gradients]).norm().item()
        for g in gradients:
            scale(g, 0.1 / norm)
        if not scale_first:
            torch._foreach_mul_(gradients, 1 / 128.0)
        optimizer.step()


@wrong(1)
def multiplier_applied_after_clipping_by_hand():
    _multiplied(False, lambda g, by: g.mul_(by))  # here


@right(1)
def multiplier_applied_before_clipping_by_hand():
    _multiplied(True, lambda g, by: g.mul_(by))


def _masters(copies: bool) -> None:
    """The optimizer holds fp32 copies of a half model's weights, which get its gradients."""
    model = net().half()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer, s = SGD(masters, lr=0.01), scaler(init_scale=1024.0)
    for _ in range(STEPS):
        x, y = batch()
        model.zero_grad()
        s.scale(nn.functional.mse_loss(model(x.half()).float(), y)).backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            if copies and master.grad is not None:
                master.grad.copy_(p.grad)
            else:
                master.grad = p.grad.detach().float()
        s.unscale_(optimizer)
        clip_grad_norm_(masters, 1.0)
        s.step(optimizer)
        s.update()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)


@right(1)
def master_weights_clipped_after_unscaling():
    _masters(copies=False)


@right(1)
def master_weights_with_copied_gradients():
    _masters(copies=True)


def _unscaled_by_hand(unscaled: Callable[[nn.Parameter, float], Tensor]) -> None:
    model, s = net(), scaler(init_scale=1024.0)
    optimizer = SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        for p in model.parameters():
            p.grad = unscaled(p, s.get_scale())
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@right(2)
def unscaled_by_hand_then_clamped():
    _unscaled_by_hand(lambda p, scale: torch.nan_to_num(p.grad / scale).clamp_(-1, 1))


@right(2)
def unscaled_by_hand_then_decayed():
    _unscaled_by_hand(lambda p, scale: torch.add(1e-3 * p.detach(), p.grad, alpha=1 / scale))


@right(3)
def unscaled_and_averaged_at_once():
    _unscaled_by_hand(lambda p, scale: p.grad.div_(2 * scale))


@right(3)
def unscaled_by_hand_through_a_clones_data():
    def unscaled(p: nn.Parameter, scale: float) -> Tensor:
        gradient = p.grad.clone()
        gradient.data.mul_(1 / scale)
        return gradient

    _unscaled_by_hand(unscaled)


@right(1)
def hand_made_scale_clipped_after_it_is_divided_out():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (mse(model, *batch()) * 1024.0).backward()
        for p in model.parameters():
            p.grad.div_(1024.0)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@right(1)
def weighted_loss_that_is_clipped():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (mse(model, *batch(), dtype=BF16) * 10.0).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@wrong(5)
def divided_by_hand_after_unscale():
    model, s = net(), scaler()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.unscale_(optimizer)
        for p in model.parameters():
            p.grad.div_(s.get_scale())  # here
        s.step(optimizer)
        s.update()


# ---- classes, functions and context managers ------------------------------------------------------


@wrong(1)
def a_class_that_clips_too_early():
    class Own(Trainer):
        def finish(self):
            clip_grad_norm_(self.model.parameters(), 0.5)  # here
            self.scaler.step(self.optimizer)
            self.scaler.update()

    Own().fit()


@wrong(2)
def a_class_that_clips_values_too_early():
    class Own(Trainer):
        def finish(self):
            clip_grad_value_(self.model.parameters(), 0.5)  # here
            self.scaler.step(self.optimizer)
            self.scaler.update()

    Own().fit()


@wrong(3)
def a_class_that_forgets_the_scaler():
    class Own(Trainer):
        def finish(self):
            self.optimizer.step()  # here

    Own().fit()


@wrong(4)
def a_class_that_steps_twice():
    class Own(Trainer):
        def finish(self):
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.step()  # here

    Own().fit()


@wrong(5)
def a_class_that_updates_too_early():
    class Own(Trainer):
        def finish(self):
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.update()
            self.scaler.step(self.optimizer)  # here
            self.scaler.update()

    Own().fit()


@wrong(6)
def a_class_whose_auxiliary_loss_is_not_scaled():
    class Own(Trainer):
        def backward(self):
            self.scaler.scale(self.loss()).backward()
            (0.1 * self.loss()).backward()

        def finish(self):
            self.scaler.step(self.optimizer)  # here
            self.scaler.update()

    Own().fit()


@wrong(6)
def cleared_through_data_but_the_second_loss_is_not_scaled():
    class Own(Trainer):
        def clear(self):
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.data.zero_()

        def backward(self):
            self.scaler.scale(self.loss()).backward()
            self.loss().backward()

        def finish(self):
            self.scaler.step(self.optimizer)  # here
            self.scaler.update()

    Own().fit()


@wrong(6)
def never_cleared():
    model, s = net(), scaler()
    optimizer = SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)  # here
        s.update()


@wrong(8)
def a_class_with_a_scaler_for_bf16():
    class Own(Trainer):
        dtype = BF16

        def backward(self):
            self.scaler.scale(self.loss()).backward()  # here

    Own().fit()


@wrong(7)
def a_class_without_a_scaler():
    class Own(Trainer):
        def backward(self):
            self.loss().backward()  # here

        def finish(self):
            self.optimizer.step()

    Own().fit()


@wrong(7)
def fp16_weights_without_a_scale():
    model = net().half()
    optimizer = SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.half()).float(), y).backward()  # here
        optimizer.step()


@wrong(18)
def a_class_that_does_not_average():
    class Own(Trainer):
        dtype = BF16
        accumulate = 4

        def backward(self):
            (self.loss() * 4).backward()  # here

        def finish(self):
            self.optimizer.step()

    Own().fit()


@right(18)
def averaged_after_unscaling():
    class Own(Trainer):
        accumulate = 4

        def backward(self):
            self.scaler.scale(self.loss() * 4).backward()

        def finish(self):
            self.scaler.unscale_(self.optimizer)
            for p in self.model.parameters():
                p.grad.div_(4)
            self.scaler.step(self.optimizer)
            self.scaler.update()

    Own().fit()


@right(3)
def a_class_as_it_should_be():
    Trainer().fit(8)


@right(6)
def a_class_that_accumulates():
    class Own(Trainer):
        accumulate = 3

    Own().fit()


@right(6)
def a_last_window_that_is_shorter():
    model, s = net(), scaler()
    optimizer = AdamW(model.parameters())
    for micro in range(11):
        s.scale(mse(model, *batch()) / 4).backward()
        if micro % 4 == 3 or micro == 10:
            s.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            s.step(optimizer)
            s.update()
            optimizer.zero_grad()


@right(9)
def a_context_manager_around_the_forward_pass():
    @contextmanager
    def mixed() -> Iterator[None]:
        with autocast(FP16), torch.enable_grad():
            yield

    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        with mixed():
            loss = nn.functional.mse_loss(model(x).float(), y)
        s.scale(loss).backward()
        s.step(optimizer)
        s.update()


@right(9)
def a_decorated_step():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())

    @torch.autocast("cpu", dtype=FP16)
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(x).float(), y)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad(set_to_none=False)
        s.scale(loss(x, y)).backward()
        s.step(optimizer)
        s.update()

    for _ in range(STEPS):
        step(*batch())


@wrong(9)
def a_region_around_an_epoch():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def epoch() -> None:
        for _ in range(STEPS):
            x, y = batch()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x).float(), y).backward()
            optimizer.step()

    with autocast(BF16):  # here
        epoch()


# ---- gradients that are given ---------------------------------------------------------------------


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        with autocast(FP16):
            return self.inner(x).float()  # type: ignore[no-any-return]


def _contrastive(z: Tensor) -> Tensor:
    z = nn.functional.normalize(z, dim=-1)
    return nn.functional.cross_entropy(z @ z.t() / 0.1, torch.arange(len(z)))


def _cached(surrogate: bool) -> None:
    model, s = _Encoder(), scaler()
    optimizer = AdamW(model.parameters())
    for _ in range(STEPS):
        chunks = batch(8)[0].split(4)
        optimizer.zero_grad()
        with torch.no_grad():
            z = torch.cat([model(x) for x in chunks])
        z.requires_grad_()
        s.scale(_contrastive(z)).backward()
        for x, g in zip(chunks, z.grad.split(4), strict=True):  # type: ignore[union-attr]
            if surrogate:
                (model(x) * g).sum().backward()
            else:
                torch.autograd.backward(model(x), g)
        s.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        s.step(optimizer)
        s.update()


@right(6)
def cached_gradients():
    _cached(surrogate=False)


@right(6)
def cached_gradients_through_a_surrogate():
    _cached(surrogate=True)


@right(6)
def cached_gradients_through_a_dot_product():
    model, s = _Encoder(), scaler()
    optimizer = AdamW(model.parameters())
    for _ in range(STEPS):
        x, _ = batch(4)
        optimizer.zero_grad()
        z = model(x).detach().requires_grad_()
        s.scale(_contrastive(z)).backward()
        torch.dot(model(x).flatten(), z.grad.flatten()).backward()
        s.step(optimizer)
        s.update()


def _pipeline(stages: list[nn.Module], s: Any, x: Tensor, y: Tensor) -> None:
    inputs, outputs = [], []
    for stage in stages:
        x = x.detach().requires_grad_()
        inputs.append(x)
        with autocast(FP16):
            x = stage(x).float()
        outputs.append(x)
    loss = s.scale(nn.functional.mse_loss(x, y))
    loss.backward()
    for i in range(len(stages) - 2, -1, -1):
        outputs[i].backward(inputs[i + 1].grad)


@right(6)
def pipeline_stages():
    stages, s = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)], scaler()
    optimizers = [Adam(stage.parameters()) for stage in stages]
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        _pipeline(stages, s, *batch())
        for optimizer in optimizers:
            s.step(optimizer)
        s.update()


@wrong(1)
def pipeline_stages_whose_last_is_clipped_too_early():
    stages, s = [nn.Linear(8, 8), nn.Linear(8, 4)], scaler()
    optimizers = [Adam(stage.parameters()) for stage in stages]
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        _pipeline(stages, s, *batch())
        clip_grad_norm_(stages[-1].parameters(), 1.0)  # here
        for optimizer in optimizers:
            s.step(optimizer)
        s.update()


@right(6)
def a_vector_of_losses():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        with autocast(FP16):
            out = model(x)
        losses = nn.functional.mse_loss(out.float(), y, reduction="none").mean(1)
        s.scale(losses).backward(torch.ones(len(losses)) / len(losses))
        s.step(optimizer)
        s.update()


@wrong(6)
def a_vector_of_losses_that_is_not_scaled():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        s.scale(mse(model, x, y)).backward()
        with autocast(FP16):
            out = model(x)
        loss = nn.functional.l1_loss(out.float(), y)
        loss.backward(torch.ones_like(loss))
        s.step(optimizer)  # here
        s.update()


@right(6)
def gradients_by_autograd_grad():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        parameters = list(model.parameters())
        grads = torch.autograd.grad(s.scale(mse(model, *batch())), parameters)
        for p, g in zip(parameters, grads, strict=True):
            p.grad = g
        s.step(optimizer)
        s.update()


@right(6)
def gradients_by_autograd_grad_divided():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        parameters = list(model.parameters())
        grads = torch.autograd.grad(s.scale(mse(model, *batch())), parameters)
        for p, g in zip(parameters, grads, strict=True):
            p.grad = g / s.get_scale()
        clip_grad_norm_(parameters, 1.0)
        optimizer.step()


# ---- several models, optimizers, threads ----------------------------------------------------------


def _thread(train: Callable[..., None], *args: int) -> threading.Thread:
    """A thread that trains where this one does: the default device is each thread's own."""

    def run() -> None:
        if device.type != "cpu":
            torch.set_default_device(device)
        train(*args)

    device = torch.get_default_device()
    return threading.Thread(target=run)


def _in_threads(train: Callable[[int], None]) -> None:
    threads = [_thread(train, i) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@right(3)
def trainings_in_threads():
    def train(i: int) -> None:
        model = copy.deepcopy(base)
        s, optimizer = scaler(init_scale=2.0 ** (10 + i)), Adam(model.parameters())
        for _ in range(12):
            optimizer.zero_grad()
            s.scale(mse(model, *batch())).backward()
            if i % 2:
                s.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 1.0)
            s.step(optimizer)
            s.update()

    base = net()
    _in_threads(train)


@right(3)
def trainings_in_threads_of_different_kinds():
    def train(i: int) -> None:
        model = copy.deepcopy(base)
        s, optimizer = scaler(enabled=i == 0), SGD(model.parameters(), lr=0.01)
        for _ in range(12):
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.data.zero_()
            s.scale(mse(model, *batch(), dtype=FP16 if i == 0 else BF16)).backward()
            s.step(optimizer)
            s.update()

    base = net()
    _in_threads(train)


@right(4)
def threads_that_share_a_model():
    def train(i: int) -> None:
        for _ in range(6):
            x, y = batch()
            with lock:
                loss = nn.functional.mse_loss(model(x), y)
                grads = torch.autograd.grad(loss, list(model.parameters()))
                for p, g in zip(model.parameters(), grads, strict=True):
                    p.grad = g
                optimizer.step()

    model, lock = net(), threading.Lock()
    optimizer = SGD(model.parameters(), lr=0.01)
    _in_threads(train)


@wrong(3)
def a_training_in_a_thread_that_forgets_the_scaler():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())

    def train() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            s.scale(mse(model, *batch())).backward()
            optimizer.step()  # here

    thread = _thread(train)
    thread.start()
    thread.join()


@right(19)
def gan_with_one_update():
    maker, critic, s = nn.Linear(4, 8), nn.Linear(8, 1), scaler()
    om, oc = Adam(maker.parameters()), Adam(critic.parameters())
    for _ in range(STEPS):
        oc.zero_grad()
        with autocast(FP16):
            fake = maker(torch.randn(8, 4))
            loss = critic(fake.detach()).float().mean() - critic(torch.randn(8, 8)).float().mean()
        s.scale(loss).backward()
        s.unscale_(oc)
        clip_grad_norm_(critic.parameters(), 1.0)
        s.step(oc)
        om.zero_grad()
        with autocast(FP16):
            loss = -critic(fake).float().mean()
        s.scale(loss).backward()
        s.step(om)
        s.update()


@right(19)
def gan_with_an_update_per_player():
    maker, critic, s = nn.Linear(4, 8), nn.Linear(8, 1), scaler(growth_interval=2)
    om, oc = Adam(maker.parameters()), Adam(critic.parameters())
    for _ in range(STEPS):
        for optimizer, sign in ((oc, 1.0), (om, -1.0)):
            optimizer.zero_grad()
            with autocast(FP16):
                loss = sign * critic(maker(torch.randn(8, 4))).float().mean()
            s.scale(loss).backward()
            s.step(optimizer)
            s.update()


@wrong(19)
def gan_whose_shared_loss_is_divided_by_two_scales():
    maker, critic, s = nn.Linear(4, 8), nn.Linear(8, 1), scaler(growth_interval=1)
    om, oc = Adam(maker.parameters()), Adam(critic.parameters())
    for _ in range(STEPS):
        om.zero_grad()
        oc.zero_grad()
        with autocast(FP16):
            loss = critic(maker(torch.randn(8, 4))).float().square().mean()
        s.scale(loss).backward()
        s.step(oc)
        s.update()
        s.step(om)  # here
        s.update()


@wrong(1)
def gan_whose_critic_is_clipped_too_early():
    maker, critic, s = nn.Linear(4, 8), nn.Linear(8, 1), scaler()
    om, oc = Adam(maker.parameters()), Adam(critic.parameters())
    for _ in range(STEPS):
        for model, optimizer in ((critic, oc), (maker, om)):
            optimizer.zero_grad()
            with autocast(FP16):
                loss = critic(maker(torch.randn(8, 4))).float().square().mean()
            s.scale(loss).backward()
            if model is critic:
                clip_grad_norm_(critic.parameters(), 0.1)  # here
            s.step(optimizer)
        s.update()


@right(4)
def two_optimizers_that_take_turns():
    model = net()
    first, second = SGD(model[0].parameters(), lr=0.1), Adam(model[2].parameters())
    for step in range(8):
        model.zero_grad()
        mse(model, *batch(), dtype=BF16).backward()
        (second if step % 2 else first).step()


@right(5)
def sharpness_aware_with_a_scaler():
    model, s = net(), scaler()
    optimizer = SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        x, y = batch()
        s.scale(mse(model, x, y)).backward()
        s.unscale_(optimizer)
        with torch.no_grad():
            norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            moves = [0.05 * p.grad / (norm + 1e-12) for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        s.update()
        optimizer.zero_grad()
        s.scale(mse(model, x, y)).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        s.step(optimizer)
        s.update()
        optimizer.zero_grad()


@right(2)
def gradient_noise_after_unscale():
    class Own(Trainer):
        def finish(self):
            self.scaler.unscale_(self.optimizer)
            for p in self.model.parameters():
                p.grad += 1e-3 * torch.randn_like(p)
                p.grad.clamp_(-1, 1)
            torch.nan_to_num(p.grad, out=p.grad)
            self.scaler.step(self.optimizer)
            self.scaler.update()

    Own().fit()


@right(2)
def gradients_centralised_and_averaged_over_workers():
    class Own(Trainer):
        def finish(self):
            for p in self.model.parameters():
                if p.ndim > 1:
                    p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
                p.grad.add_(p.grad.clone()).div_(2)
            self.scaler.step(self.optimizer)
            self.scaler.update()

    Own().fit()


@right(2)
def frozen_rows_are_masked():
    class Own(Trainer):
        def finish(self):
            for p in self.model.parameters():
                p.grad[0] = 0
                p.grad.masked_fill_(p.grad.isnan(), 0.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()

    Own().fit()


@right(3)
def an_optimizer_of_ones_own():
    class Own(Optimizer):
        def __init__(self, params: Any, lr: float = 0.01) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.clamp_(-1, 1)
                        p.add_(p.grad, alpha=-group["lr"])

    t = Trainer()
    t.optimizer = Own(t.model.parameters())
    t.fit()


@right(3)
def steps_by_hand_without_an_optimizer():
    model = net()
    for _ in range(STEPS):
        x, y = batch()
        model.zero_grad()
        mse(model, x, y, BF16).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
                p.grad = None


@right(3)
def a_step_with_a_closure():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.01)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse(model, *batch(), dtype=BF16)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)


@right(5)
def a_batch_that_is_dropped_for_its_norm():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for step in range(8):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        if step in (2, 5) or not torch.isfinite(norm):
            s.update()
            continue
        s.step(optimizer)
        s.update()


@right(21)
def a_schedule_without_skips():
    t = Trainer()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(t.optimizer, 10)
    for _ in range(STEPS):
        t.fit(1)
        schedule.step()


@right(6)
def multi_task_losses_scaled_one_by_one():
    body, heads, s = nn.Linear(8, 8), [nn.Linear(8, 4), nn.Linear(8, 4)], scaler()
    optimizer = Adam(chain(body.parameters(), *(head.parameters() for head in heads)))
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        with autocast(FP16):
            h = body(x)
            losses = [nn.functional.mse_loss(head(h).float(), y) for head in heads]
        for weight, loss in zip((1.0, 0.3), losses, strict=True):
            s.scale(weight * loss).backward(retain_graph=True)
        s.step(optimizer)
        s.update()


@wrong(6)
def multi_task_losses_of_which_one_is_scaled():
    body, heads, s = nn.Linear(8, 8), [nn.Linear(8, 4), nn.Linear(8, 4)], scaler()
    optimizer = Adam(chain(body.parameters(), *(head.parameters() for head in heads)))
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        with autocast(FP16):
            h = body(x)
            first, second = (nn.functional.mse_loss(head(h).float(), y) for head in heads)
        s.scale(first).backward(retain_graph=True)
        second.backward()
        s.step(optimizer)  # here
        s.update()


@right(11)
def losses_over_a_masked_sum():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        mask = torch.rand(8, 1) > 0.3
        optimizer.zero_grad()
        with autocast(FP16):
            out = model(x)
        loss = ((out.float() - y).square() * mask).sum() / mask.sum().clamp(min=1)
        s.scale(loss).backward()
        s.step(optimizer)
        s.update()


@wrong(11)
def a_loss_by_hand_in_bf16():
    class Own(Trainer):
        def loss(self):
            x, y = batch()
            with autocast(BF16):
                out = self.model(x)
                return (out - y.bfloat16()).abs().sum() / 32  # here

        def backward(self):
            self.loss().backward()

        def finish(self):
            self.optimizer.step()

    Own().fit()
