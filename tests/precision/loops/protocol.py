"""Mistakes of the gradient scale's protocol."""

from __future__ import annotations

import io
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, StepLR

from precision.loops import right, wrong
from precision.loops.parts import BF16, FP16, autocast, batch, mse, net, scaler

STEPS = 5


# ---- 1 clipping ----------------------------------------------------------------------------------


@wrong(1)
def clip_norm_on_scaled():
    model, s = net(), scaler()
    optimizer = AdamW(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        clip_grad_norm_(model.parameters(), 1.0)  # here
        s.step(optimizer)
        s.update()


@wrong(1, "AMP002")
def clip_value_on_scaled():
    model, s = net(), scaler()
    optimizer = AdamW(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        clip_grad_value_(model.parameters(), 0.5)  # here
        s.step(optimizer)
        s.update()


@wrong(1)
def clip_by_hand_on_scaled():
    model, s = net(), scaler()
    optimizer = AdamW(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))  # here
        s.step(optimizer)
        s.update()


@right(1)
def clip_after_unscale():
    model, s = net(), scaler()
    optimizer = AdamW(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        clip_grad_value_(model.parameters(), 0.5)
        s.step(optimizer)
        s.update()


@right(1)
def norm_only_logged_with_a_disabled_scaler():
    model, s = net(), scaler(enabled=False)
    optimizer = AdamW(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch(), dtype=BF16)).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        s.step(optimizer)
        s.update()


# ---- 2 penalties ---------------------------------------------------------------------------------


@wrong(2)
def penalty_of_scaled_gradients():
    model, s = net(), scaler()
    optimizer = SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mse(model, *batch())
        gradients = torch.autograd.grad(s.scale(loss), model.parameters(), create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in gradients).sqrt()
        s.scale(loss + penalty).backward()  # here
        s.step(optimizer)
        s.update()


@right(2)
def penalty_of_gradients_that_were_divided():
    model, s = net(), scaler()
    optimizer = SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mse(model, *batch())
        gradients = torch.autograd.grad(s.scale(loss), model.parameters(), create_graph=True)
        gradients = [gradient / s.get_scale() for gradient in gradients]
        penalty = sum(gradient.square().sum() for gradient in gradients).sqrt()
        s.scale(loss + penalty).backward()
        s.step(optimizer)
        s.update()


@wrong(2)
def penalty_on_scaled():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        for p in model.parameters():
            p.grad.data.add_(p.data.sign(), alpha=1e-3)  # here
        s.step(optimizer)
        s.update()


@wrong(2)
def nan_to_num_on_scaled():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        for p in model.parameters():
            torch.nan_to_num_(p.grad, nan=0.0)  # here
        s.step(optimizer)
        s.update()


@wrong(2)
def gradient_replaced_by_noisy_one():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        for p in model.parameters():
            p.grad = p.grad + 0.01 * torch.randn_like(p)  # here
        s.step(optimizer)
        s.update()


@right(2)
def penalty_in_the_loss_and_after_unscale():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mse(model, *batch()) + 1e-3 * sum(p.abs().sum() for p in model.parameters())
        s.scale(loss).backward()
        s.unscale_(optimizer)
        for p in model.parameters():
            p.grad.data.add_(p.data.sign(), alpha=1e-3)
        s.step(optimizer)
        s.update()


@right(2)
def averaging_masking_and_flat_buckets_commute():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        for p in model.parameters():
            p.grad.div_(2)
            p.grad.mul_(torch.ones_like(p))
        flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        flat.mul_(0.5)
        at = 0
        for p in model.parameters():
            p.grad.copy_(flat[at : at + p.numel()].view_as(p))
            at += p.numel()
        s.step(optimizer)
        s.update()


@right(2)
def unscaling_by_hand():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        for p in model.parameters():
            p.grad.div_(s.get_scale())
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@right(2)
def unscaling_by_hand_into_new_tensors():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        inverse = 1.0 / s.get_scale()
        for p in model.parameters():
            p.grad = p.grad * inverse
        optimizer.step()


@wrong(2)
def normalised_gradients():
    model, s = net(), scaler()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        for p in model.parameters():
            p.grad = p.grad / p.grad.norm()  # here
        s.step(optimizer)
        s.update()


@right(2)
def projected_conflicting_gradients():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward(retain_graph=False)
        first = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        for p, g in zip(model.parameters(), first, strict=True):
            onto = (p.grad * g).sum() / (g * g).sum()
            p.grad = p.grad - onto * g
            p.grad.sub_(p.grad.mean())
        s.step(optimizer)
        s.update()


@right(2)
def fp32_main_gradients():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    mains = [torch.zeros_like(p) for p in model.parameters()]
    for _ in range(STEPS):
        for main in mains:
            main.zero_()
        for _ in range(2):
            model.zero_grad()
            s.scale(mse(model, *batch()) / 2).backward()
            for main, p in zip(mains, model.parameters(), strict=True):
                main.add_(p.grad)
        for main, p in zip(mains, model.parameters(), strict=True):
            p.grad = main.clone()
        s.unscale_(optimizer)
        s.step(optimizer)
        s.update()


# ---- 3, 4 steps ----------------------------------------------------------------------------------


@wrong(3)
def step_without_unscale():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        optimizer.step()  # here


@right(3)
def plain_amp():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)
        s.update()


@right(3)
def fused_optimizer_divides_itself():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters(), fused=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        if step % 2:
            s.unscale_(optimizer)
        s.step(optimizer)
        s.update()


@wrong(4)
def step_after_scaler_step():
    model, s = net(), scaler()
    optimizer = SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)
        s.update()
        optimizer.step()  # here


@right(4)
def sharpness_aware_steps_between_two_backwards():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        mse(model, x, y, BF16).backward()
        optimizer.step()
        optimizer.zero_grad()
        mse(model, x, y, BF16).backward()
        optimizer.step()


@right(4)
def lbfgs_evaluates_its_closure_often():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x, y = batch()

    def closure():
        optimizer.zero_grad()
        loss = mse(model, x, y, BF16)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)


# ---- 5 update ------------------------------------------------------------------------------------


@wrong(5)
def update_between_unscale_and_step():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.unscale_(optimizer)
        s.update()
        s.step(optimizer)  # here
        s.update()


@wrong(5)
def update_missing():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    try:
        for _ in range(STEPS):
            optimizer.zero_grad()
            s.scale(mse(model, *batch())).backward()
            s.step(optimizer)  # here
    except RuntimeError:
        pass


@wrong(5)
def update_twice():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    try:
        for _ in range(STEPS):
            optimizer.zero_grad()
            s.scale(mse(model, *batch())).backward()
            s.step(optimizer)
            s.update()
            s.update()  # here
    except AssertionError:
        pass


@right(5)
def step_skipped_by_the_user():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.unscale_(optimizer)
        if step != 1:
            s.step(optimizer)
        s.update()


# ---- 6 accumulation ------------------------------------------------------------------------------


@wrong(6)
def unscale_and_update_per_micro_batch():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            s.scale(mse(model, *batch()) / 2).backward()
            s.unscale_(optimizer)  # here
            s.update()
        s.step(optimizer)
        s.update()


@wrong(6)
def backward_pass_after_unscaling():
    model, s = net(), scaler()
    optimizer = SGD(model.parameters(), lr=1e-9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch()) / 2).backward()
        s.unscale_(optimizer)
        s.scale(mse(model, *batch()) / 2).backward()
        s.step(optimizer)  # here
        s.update()


@wrong(3)
def gradients_made_anew_after_unscaling():
    model, s = net(), scaler()
    optimizer = SGD(model.parameters(), lr=1e-9)
    for _ in range(STEPS):
        s.scale(mse(model, *batch())).backward()
        s.unscale_(optimizer)
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)  # here
        s.update()


@right(6)
def penalty_without_a_scale_after_unscaling():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.unscale_(optimizer)
        (1e-3 * sum(p.square().sum() for p in model.parameters())).backward()
        s.step(optimizer)
        s.update()


@wrong(6)
def second_loss_is_not_scaled():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        (0.1 * mse(model, *batch())).backward()
        s.step(optimizer)  # here
        s.update()


@wrong(6)
def sum_of_scaled_and_unscaled_loss():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = s.scale(mse(model, *batch())) + 0.1 * mse(model, *batch())
        loss.backward()  # here
        s.step(optimizer)
        s.update()


@wrong(6)
def divided_by_hand_and_by_the_scaler():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        for p in model.parameters():
            p.grad.div_(s.get_scale())
        clip_grad_norm_(model.parameters(), 1.0)
        s.step(optimizer)  # here
        s.update()


@wrong(6)
def optimizers_stepped_through_each_others_scaler():
    models, scalers = (net(), net()), (scaler(), scaler())
    optimizers = [Adam(model.parameters()) for model in models]
    for _ in range(STEPS):
        for model, s in zip(models, scalers, strict=True):
            s.scale(mse(model, *batch())).backward()
        for optimizer, s in zip(optimizers, reversed(scalers), strict=True):
            s.step(optimizer)  # here
            s.update()
            optimizer.zero_grad()


@wrong(6)
def loss_is_not_scaled_but_divided():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    s.scale(torch.ones(()))
    for _ in range(STEPS):
        optimizer.zero_grad()
        mse(model, *batch()).backward()
        s.step(optimizer)  # here
        s.update()


@right(6)
def two_scaled_backwards():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.scale(0.1 * mse(model, *batch())).backward()
        s.unscale_(optimizer)
        s.step(optimizer)
        s.update()


@right(6)
def accumulation_with_averaging():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(4):
            s.scale(mse(model, *batch()) / 4).backward()
        s.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        s.step(optimizer)
        s.update()


@right(6)
def gan_leaves_gradients_that_are_cleared():
    generator, s = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)), scaler()
    critic = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    og, oc = Adam(generator.parameters()), Adam(critic.parameters())
    bce = nn.functional.binary_cross_entropy_with_logits
    for _ in range(STEPS):
        with autocast():
            made = generator(torch.randn(8, 4))
            real, fake = critic(torch.randn(8, 8)), critic(made.detach())
            loss = bce(real.float(), torch.ones(8, 1)) + bce(fake.float(), torch.zeros(8, 1))
        oc.zero_grad()
        s.scale(loss).backward()
        s.step(oc)
        with autocast():
            loss = bce(critic(made).float(), torch.ones(8, 1))
        og.zero_grad()
        s.scale(loss).backward()
        s.step(og)
        s.update()


@right(6)
def gradients_cleared_by_hand_in_place():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.detach_().zero_()
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)
        s.update()


@right(6)
def gradient_penalty_by_double_backward():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        with autocast():
            loss = nn.functional.mse_loss(model(x).float(), y)
        grads = torch.autograd.grad(s.scale(loss), list(model.parameters()), create_graph=True)
        inverse = 1.0 / s.get_scale()
        with autocast():
            loss = loss + 1e-3 * sum((g * inverse).pow(2).sum() for g in grads).sqrt()
        s.scale(loss).backward()
        s.unscale_(optimizer)
        s.step(optimizer)
        s.update()


@right(6)
def gradient_penalty_of_a_critic():
    generator, critic, s = (
        nn.Linear(4, 8),
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)),
        scaler(),
    )
    og, oc = Adam(generator.parameters()), Adam(critic.parameters())
    for _ in range(STEPS):
        oc.zero_grad()
        real = torch.randn(8, 8)
        with autocast():
            fake = generator(torch.randn(8, 4)).detach()
            loss = critic(fake).float().mean() - critic(real).float().mean()
        between = (0.5 * real + 0.5 * fake.float()).requires_grad_()
        with autocast():
            out = critic(between)
        (slope,) = torch.autograd.grad(s.scale(out.float().sum()), between, create_graph=True)
        penalty = ((slope / s.get_scale()).norm(2, 1) - 1).square().mean()
        s.scale(loss + 10 * penalty).backward()
        s.step(oc)
        s.update()
        og.zero_grad()
        with autocast():
            loss = -critic(generator(torch.randn(8, 4))).float().mean()
        s.scale(loss).backward()
        s.step(og)
        s.update()


@right(6)
def branches_that_take_turns():
    one, two, last, s = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4), scaler()
    optimizer = Adam(chain(one.parameters(), two.parameters(), last.parameters()))
    for step in range(2 * STEPS):
        x, y = batch()
        optimizer.zero_grad(set_to_none=bool(step % 3))
        with autocast():
            out = last((one if step % 2 else two)(x))
        s.scale(nn.functional.mse_loss(out.float(), y)).backward()
        s.unscale_(optimizer)
        clip_grad_norm_(one.parameters(), 1.0)
        s.step(optimizer)
        s.update()


@wrong(3)
def optimizers_within_a_scaled_backward_pass():
    model, s = net(), scaler()
    optimizers = {p: SGD([p], lr=1e-6) for p in model.parameters()}

    def hook(p):
        optimizers[p].step()  # here
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for _ in range(STEPS):
        s.scale(mse(model, *batch())).backward()


@right(3)
def optimizers_within_the_backward_pass_that_unscale():
    model, s = net(), scaler()
    optimizers = {p: SGD([p], lr=0.1) for p in model.parameters()}

    def hook(p):
        p.grad.div_(s.get_scale())
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for _ in range(STEPS):
        s.scale(mse(model, *batch())).backward()


@right(4)
def optimizers_within_the_backward_pass():
    model = net()
    optimizers = {p: SGD([p], lr=0.1) for p in model.parameters()}

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for _ in range(STEPS):
        mse(model, *batch(), dtype=BF16).backward()


# ---- 8 bf16, 19 optimizers -----------------------------------------------------------------------


@wrong(8)
def scaler_with_bf16():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mse(model, *batch(), dtype=BF16)
        s.scale(loss).backward()  # here
        s.step(optimizer)
        s.update()


@right(8)
def scaler_disabled_with_bf16():
    model, s = net(), scaler(enabled=False)
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch(), dtype=BF16)).backward()
        s.step(optimizer)
        s.update()


@right(8)
def one_fp16_region_among_bf16():
    first, second, s = nn.Linear(8, 8), nn.Linear(8, 4), scaler()
    optimizer = Adam(chain(first.parameters(), second.parameters()))
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        with autocast(BF16):
            h = first(x)
        with autocast(FP16):
            out = second(h.float())
        s.scale(nn.functional.mse_loss(out.float(), y)).backward()
        s.step(optimizer)
        s.update()


@wrong(19)
def update_between_two_optimizers():
    one, two, s = nn.Linear(8, 8), nn.Linear(8, 4), scaler(growth_interval=2)
    o1, o2 = Adam(one.parameters()), Adam(two.parameters())
    for _ in range(STEPS):
        x, y = batch()
        o1.zero_grad()
        o2.zero_grad()
        with autocast():
            out = two(one(x))
        s.scale(nn.functional.mse_loss(out.float(), y)).backward()
        s.step(o1)
        s.update()
        s.step(o2)  # here
        s.update()


@right(19)
def one_update_after_two_optimizers():
    one, two, s = nn.Linear(8, 8), nn.Linear(8, 4), scaler(growth_interval=2)
    o1, o2 = Adam(one.parameters()), Adam(two.parameters())
    for _ in range(STEPS):
        x, y = batch()
        o1.zero_grad()
        o2.zero_grad()
        with autocast():
            h = one(x)
            l1, l2 = h.float().pow(2).mean(), nn.functional.mse_loss(two(h).float(), y)
        s.scale(l1 + l2).backward(retain_graph=True)
        s.scale(l2 - l1).backward()
        s.unscale_(o1)
        s.step(o1)
        s.step(o2)
        s.update()


@right(19)
def two_scalers():
    one, two, s1, s2 = net(), net(), scaler(), scaler(init_scale=1024.0)
    o1, o2 = Adam(one.parameters()), Adam(two.parameters())
    for _ in range(STEPS):
        for model, optimizer, s in ((one, o1, s1), (two, o2, s2)):
            optimizer.zero_grad()
            s.scale(mse(model, *batch())).backward()
            s.step(optimizer)
            s.update()


# ---- 20 checkpoints, 21 schedules ----------------------------------------------------------------


@wrong(20)
def checkpoint_without_scaler():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)
        s.update()
        torch.save({"model": model.state_dict(), "opt": optimizer.state_dict()}, io.BytesIO())  # here


def _state_after_a_step() -> dict[str, Any]:
    """What Adam keeps of :func:`net`."""
    parameters = list(net().parameters())
    state = {
        number: {"step": torch.ones(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        for number, p in enumerate(parameters)
    }
    return {**Adam(parameters).state_dict(), "state": state}


@wrong(20)
def resumed_without_scaler():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    optimizer.load_state_dict(_state_after_a_step())  # here
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)
        s.update()


@right(20)
def checkpoint_in_several_files():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    s.load_state_dict(scaler().state_dict())
    optimizer.load_state_dict(_state_after_a_step())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)
        s.update()
        torch.save(model.state_dict(), io.BytesIO())
        torch.save(optimizer.state_dict(), io.BytesIO())
        torch.save(s.state_dict(), io.BytesIO())
    torch.save(
        {"model": model.state_dict(), "opt": optimizer.state_dict(), "scaler": s.state_dict()}, io.BytesIO()
    )


@right(20)
def moved_before_the_first_step():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)
        s.update()


@right(20)
def weights_exported_alone():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)
        s.update()
    torch.save({"model": model.state_dict()}, io.BytesIO())


@wrong(21)
def schedule_on_skipped_steps():
    model, s = net(), scaler(init_scale=2.0**40)
    optimizer = Adam(model.parameters())
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(STEPS + 3):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)
        s.update()
        schedule.step()  # here


@right(21)
def schedule_that_waits():
    model, s = net(), scaler(init_scale=2.0**24)
    optimizer = Adam(model.parameters())
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(STEPS + 5):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        scale = s.get_scale()
        s.step(optimizer)
        s.update()
        if s.get_scale() >= scale:
            schedule.step()


@right(21)
def schedule_by_epochs():
    model, s = net(), scaler(init_scale=2.0**40)
    optimizer = Adam(model.parameters())
    schedule = StepLR(optimizer, 1)
    for _ in range(4):
        for _ in range(3):
            optimizer.zero_grad()
            s.scale(mse(model, *batch())).backward()
            s.step(optimizer)
            s.update()
        schedule.step()


# ---- 22 half weights, 29 collapse ----------------------------------------------------------------


@wrong(22)
def half_model_under_autocast():
    model = net().bfloat16()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        with autocast(BF16):  # here
            loss = nn.functional.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()


@wrong(22)
def half_model_that_the_scaler_refuses():
    model, s = net().half(), scaler(init_scale=8.0)
    optimizer = SGD(model.parameters(), lr=0.1)
    x, y = batch()
    with autocast(FP16):
        loss = nn.functional.mse_loss(model(x).float(), y)
    s.scale(loss).backward()
    with suppress(ValueError):
        s.step(optimizer)  # here


@right(22)
def adapters_on_a_half_base():
    base, adapter, s = nn.Linear(8, 8).bfloat16().requires_grad_(False), nn.Linear(8, 4), scaler()
    optimizer = AdamW(adapter.parameters())
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        with autocast(FP16):
            out = adapter(base(x))
        s.scale(nn.functional.mse_loss(out.float(), y)).backward()
        s.step(optimizer)
        s.update()


@wrong(29)
def loss_is_nan_at_any_scale():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(8):
        x, y = batch()
        optimizer.zero_grad()
        with autocast():
            loss = torch.sqrt(-1.0 - nn.functional.mse_loss(model(x).float(), y))
        s.scale(loss).backward()  # here
        s.step(optimizer)
        s.update()


@right(29)
def scale_that_takes_long_to_settle():
    model, s = net(), scaler(init_scale=2.0**28)
    optimizer = Adam(model.parameters())
    for _ in range(14):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)
        s.update()


@right(29)
def batches_with_nan_now_and_then():
    model, s = net(), scaler(init_scale=1024.0)
    optimizer = Adam(model.parameters())
    for step in range(10):
        x, y = batch()
        optimizer.zero_grad()
        s.scale(mse(model, x * (torch.nan if step in (1, 2, 6) else 1.0), y)).backward()
        s.step(optimizer)
        s.update()


@right(29)
def isolated_overflows():
    model, s = net(), scaler(growth_interval=2)
    optimizer = Adam(model.parameters())
    for step in range(12):
        x, y = batch()
        optimizer.zero_grad()
        s.scale(mse(model, x * (1e30 if step % 5 == 3 else 1.0), y)).backward()
        s.step(optimizer)
        s.update()
