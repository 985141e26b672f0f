"""Programs of kinds that no rule was written with in mind, most of them healthy."""

from __future__ import annotations

import copy
import io
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint_sequential

from precision.loops import right, wrong
from precision.loops.parts import BF16, FP16, autocast, batch, mse, net, scaler

STEPS = 6


def _step(loss: Tensor, optimizer: Optimizer, s: Any, clip: float | None = None) -> None:
    """A step as it should be."""
    optimizer.zero_grad()
    s.scale(loss).backward()
    if clip is not None:
        s.unscale_(optimizer)
        clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], clip)
    s.step(optimizer)
    s.update()


@right(7)
def a_loss_scaler_of_ones_own():
    class DynamicScaler:
        def __init__(self) -> None:
            self.scale, self.good = 2.0**14, 0

        def step(self, optimizer: Optimizer, params: list[Tensor]) -> None:
            bad = any(not torch.isfinite(p.grad).all() for p in params)
            if bad:
                self.scale, self.good = self.scale / 2, 0
                return
            for p in params:
                p.grad.data.mul_(1.0 / self.scale)
            clip_grad_norm_(params, 1.0)
            optimizer.step()
            self.good += 1
            if self.good % 3 == 0:
                self.scale *= 2

    model, own = net(), DynamicScaler()
    optimizer = AdamW(model.parameters())
    for _ in range(STEPS + 4):
        optimizer.zero_grad()
        (mse(model, *batch()) * own.scale).backward()
        own.step(optimizer, list(model.parameters()))


@right(22)
def fp16_model_with_fp32_masters_and_a_constant_scale():
    model = net().half()
    masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    optimizer = SGD(masters, lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        x, y = batch()
        for p in model.parameters():
            p.grad = None
        (128.0 * nn.functional.mse_loss(model(x.half()).float(), y)).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            if master.grad is None:
                master.grad = torch.empty_like(master)
            master.grad.data.copy_(p.grad.data)
            master.grad.data.mul_(1.0 / 128.0)
        clip_grad_norm_(masters, 1.0)
        optimizer.step()
        for master, p in zip(masters, model.parameters(), strict=True):
            p.data.copy_(master.data)


@right(15)
def a_mean_teacher():
    student, s = net(), scaler()
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = AdamW(student.parameters())
    for step in range(STEPS):
        x, y = batch()
        with torch.no_grad(), autocast(FP16):
            target = teacher(x).float()
        with autocast(FP16):
            out = student(x).float()
        loss = nn.functional.mse_loss(out, y) + 0.1 * nn.functional.mse_loss(out, target)
        _step(loss, optimizer, s, clip=1.0)
        alpha = min(1 - 1 / (step + 1), 0.99)
        for t, p in zip(teacher.parameters(), student.parameters(), strict=True):
            t.data.mul_(alpha).add_(p.data, alpha=1 - alpha)


@right(6)
def model_agnostic_meta_learning():
    model, s = nn.Linear(8, 4), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        (x, y), (xt, yt) = batch(), batch()
        weights = dict(model.named_parameters())
        loss = nn.functional.mse_loss(torch.func.functional_call(model, weights, x), y)
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        fast = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
        with autocast(FP16):
            out = torch.func.functional_call(model, fast, xt)
        _step(nn.functional.mse_loss(out.float(), yt), optimizer, s)


@right(20)
def training_that_is_saved_and_resumed():
    def build() -> tuple[Any, ...]:
        model = net()
        return model, AdamW(model.parameters()), scaler(growth_interval=2)

    parts = build()
    for _ in range(2):
        model, optimizer, s = parts
        for _ in range(3):
            _step(mse(model, *batch()), optimizer, s)
        file = io.BytesIO()
        torch.save([part.state_dict() for part in parts], file)
        file.seek(0)
        new = build()
        for part, state in zip(new, torch.load(file), strict=True):
            part.load_state_dict(state)
        parts = new


@right(3)
def layers_unfrozen_one_by_one():
    model, s = net(), scaler()
    model[0].requires_grad_(False)
    optimizer = AdamW(model[2].parameters())
    for step in range(STEPS):
        if step == 3:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-4})
        _step(mse(model, *batch()), optimizer, s, clip=1.0)


@right(4)
def an_optimizer_that_is_replaced():
    model, s = net(), scaler()
    optimizer: Optimizer = Adam(model.parameters())
    for step in range(STEPS):
        if step == 3:
            optimizer = SGD(model.parameters(), lr=0.01)
        _step(mse(model, *batch()), optimizer, s, clip=1.0)


@right(6)
def several_roots_at_once():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = s.scale([mse(model, *batch()), 0.5 * mse(model, *batch())])
        torch.autograd.backward(losses)
        s.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        s.step(optimizer)
        s.update()


@right(6)
def losses_weighted_by_uncertainty():
    model, s = net(), scaler()
    log_variance = nn.Parameter(torch.zeros(2))
    optimizer = Adam([*model.parameters(), log_variance])
    for _ in range(STEPS):
        losses = torch.stack([mse(model, *batch()), mse(model, *batch())])
        _step((losses * torch.exp(-log_variance) + log_variance).sum(), optimizer, s, clip=5.0)


@right(6)
def examples_weighted_by_a_tensor():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        with autocast(FP16):
            out = model(x).float()
        each = nn.functional.mse_loss(out, y, reduction="none").mean(1)
        _step((each * torch.rand(8)).sum() / 8, optimizer, s, clip=1.0)


@right(2)
def adaptive_gradient_clipping():
    model, s = net(), scaler()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.unscale_(optimizer)
        for p in model.parameters():
            limit = 0.01 * p.detach().norm().clamp_min(1e-3)
            norm = p.grad.norm()
            if norm > limit:
                p.grad.detach().mul_(limit / norm)
        s.step(optimizer)
        s.update()


@right(2)
def gradients_in_one_flat_buffer():
    model, s = net(), scaler()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    at = 0
    for p in model.parameters():
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        flat.zero_()
        s.scale(mse(model, *batch())).backward()
        s.unscale_(optimizer)
        flat.mul_((1.0 / (flat.norm() + 1e-6)).clamp(max=1.0))
        s.step(optimizer)
        s.update()


@right(4)
def lookahead_around_an_optimizer():
    class Lookahead:
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer, self.count = optimizer, 0
            self.slow = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]

        def after(self) -> None:
            self.count += 1
            if self.count % 3 == 0:
                fast = (p for g in self.optimizer.param_groups for p in g["params"])
                for slow, p in zip(self.slow, fast, strict=True):
                    slow.add_(p.data - slow, alpha=0.5)
                    p.data.copy_(slow)

    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    lookahead = Lookahead(optimizer)
    for _ in range(STEPS):
        _step(mse(model, *batch()), optimizer, s)
        lookahead.after()


@right(25)
def stochastic_weight_averaging():
    model, s = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), scaler()
    average = AveragedModel(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = SWALR(optimizer, swa_lr=0.05)
    for _ in range(STEPS):
        _step(mse(model, *batch()), optimizer, s)
        average.update_parameters(model)
        schedule.step()
    update_bn([batch()[0] for _ in range(3)], average)
    with torch.no_grad(), autocast(FP16):
        average.eval()(batch()[0])


@right(17)
def checkpoints_in_segments():
    model, s = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 4)), scaler()
    optimizer = AdamW(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        with autocast(FP16):
            out = checkpoint_sequential(model, 2, x.requires_grad_(), use_reentrant=False)
        _step(nn.functional.mse_loss(out.float(), y), optimizer, s, clip=1.0)


@right(17)
def a_straight_through_estimator():
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return (x * 8).round() / 8

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

    first, last, s = nn.Linear(8, 8), nn.Linear(8, 4), scaler()
    optimizer = AdamW(chain(first.parameters(), last.parameters()))
    for _ in range(STEPS):
        x, y = batch()
        with autocast(FP16):
            out = last(Round.apply(first(x)))
        _step(nn.functional.mse_loss(out.float(), y), optimizer, s)


@right(6)
def gradients_reversed_for_an_adversary():
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return -0.5 * g

    body, head, adversary, s = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 2), scaler()
    optimizer = Adam(chain(body.parameters(), head.parameters(), adversary.parameters()))
    for _ in range(STEPS):
        x, y = batch()
        with autocast(FP16):
            h = body(x)
            out, domain = head(h).float(), adversary(Reverse.apply(h)).float()
        labels = torch.randint(0, 2, (8,))
        loss = nn.functional.mse_loss(out, y) + nn.functional.cross_entropy(domain, labels)
        _step(loss, optimizer, s, clip=1.0)


@right(11)
def a_variational_autoencoder():
    encode, decode, s = nn.Linear(8, 8), nn.Linear(4, 8), scaler()
    optimizer = Adam(chain(encode.parameters(), decode.parameters()))
    for _ in range(STEPS):
        x, _ = batch()
        with autocast(FP16):
            mean, log_variance = encode(x).float().chunk(2, 1)
            z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
            out = decode(z).float()
        kl = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1).mean()
        _step(nn.functional.mse_loss(out, x) + 0.01 * kl, optimizer, s)


@right(11)
def a_focal_loss_and_label_smoothing():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        x, labels = batch()[0], torch.randint(0, 4, (8,))
        with autocast(FP16):
            logits = model(x).float()
        ce = nn.functional.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)
        focal = ((1 - torch.exp(-ce)) ** 2 * ce).mean()
        _step(focal, optimizer, s)


@right(11)
def connectionist_temporal_classification():
    model, s = nn.GRU(8, 8), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        with torch.backends.mkldnn.flags(enabled=False):
            out, _ = model(torch.randn(12, 2, 8))
        with autocast(FP16):
            logits = out @ torch.eye(8)
        loss = nn.functional.ctc_loss(
            logits.float().log_softmax(-1),
            torch.randint(1, 8, (2, 3)),
            torch.tensor([12, 12]),
            torch.tensor([3, 3]),
        )
        _step(loss, optimizer, s, clip=1.0)


@right(30)
def attention_with_infinite_masks():
    model, s = nn.Linear(8, 24), scaler()
    optimizer = Adam(model.parameters())
    mask = torch.full((8, 8), -torch.inf).triu(1)
    for _ in range(STEPS):
        x, _ = batch()
        with autocast(FP16):
            q, k, v = model(x).chunk(3, -1)
            weights = torch.softmax((q @ k.t()) / 8**0.5 + mask.to(q.dtype), -1)
            out = weights.to(v.dtype) @ v
        _step(out.float().square().mean(), optimizer, s)


@right(8)
def one_model_in_bf16_and_one_in_fp16():
    one, two, s = net(), net(), scaler()
    o1, o2 = Adam(one.parameters()), Adam(two.parameters())
    for _ in range(STEPS):
        _step(mse(one, *batch(), dtype=FP16), o1, s)
        o2.zero_grad()
        mse(two, *batch(), dtype=BF16).backward()
        clip_grad_norm_(two.parameters(), 1.0)
        o2.step()


@right(4)
def actor_and_critic():
    body, actor, critic, s = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1), scaler()
    optimizer = Adam(chain(body.parameters(), actor.parameters(), critic.parameters()))
    for _ in range(STEPS):
        with autocast(FP16):
            h = body(torch.randn(8, 4)).relu()
            policy, value = torch.distributions.Categorical(logits=actor(h).float()), critic(h).float()[:, 0]
        action, reward = policy.sample(), torch.randn(8)
        advantage = (reward - value).detach()
        loss = -(policy.log_prob(action) * advantage).mean() + (reward - value).square().mean()
        _step(loss - 0.01 * policy.entropy().mean(), optimizer, s, clip=0.5)


@right(6)
def truncated_backpropagation_with_a_kept_graph():
    cell, last, s = nn.Linear(12, 4), nn.Linear(4, 4), scaler()
    optimizer = SGD(chain(cell.parameters(), last.parameters()), lr=0.05)
    for _ in range(STEPS):
        h = torch.zeros(8, 4)
        optimizer.zero_grad()
        for t in range(4):
            x, y = batch()
            with autocast(FP16):
                h = torch.tanh(cell(torch.cat([x, h.to(x.dtype)], 1)).float())
                out = last(h).float()
            s.scale(nn.functional.mse_loss(out, y) / 4).backward(retain_graph=t < 3)
        s.step(optimizer)
        s.update()


@right(6)
def deep_supervision_with_anomaly_detection():
    layers, heads, s = [nn.Linear(8, 8) for _ in range(3)], [nn.Linear(8, 4) for _ in range(3)], scaler()
    optimizer = Adam(p for m in (*layers, *heads) for p in m.parameters())
    with torch.autograd.set_detect_anomaly(True):
        for _ in range(3):
            x, y = batch()
            losses = []
            with autocast(FP16):
                for layer, head in zip(layers, heads, strict=True):
                    x = layer(x).relu()
                    losses.append(nn.functional.mse_loss(head(x).float(), y))
            _step(sum(losses) / len(losses), optimizer, s)


@right(29)
def a_scale_that_is_set_by_hand():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)
        s.update(2.0 ** (10 + step))


@right(5)
def a_scaler_that_is_made_anew():
    model = net()
    optimizer = Adam(model.parameters())
    for epoch in range(3):
        s = scaler(init_scale=2.0 ** (8 + epoch))
        for _ in range(2):
            _step(mse(model, *batch()), optimizer, s, clip=1.0)


@right(15)
def statistics_kept_while_training():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    confusion, seen, loss_sum = torch.zeros(4, 4), torch.zeros((), dtype=torch.long), 0.0
    running = torch.zeros(4)
    for _ in range(STEPS):
        x, labels = batch()[0], torch.randint(0, 4, (8,))
        with autocast(FP16):
            logits = model(x)
        loss = nn.functional.cross_entropy(logits.float(), labels)
        _step(loss, optimizer, s)
        confusion.index_put_((labels, logits.argmax(1)), torch.ones(8), accumulate=True)
        seen += 8
        loss_sum += loss.item()
        running.mul_(0.99).add_(logits.detach().float().mean(0), alpha=0.01)


@right(2)
def conflicting_gradients_projected():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        parameters = list(model.parameters())
        tasks = [torch.autograd.grad(s.scale(mse(model, *batch())), parameters) for _ in range(2)]
        for i, p in enumerate(parameters):
            one, two = tasks[0][i], tasks[1][i]
            dot = (one * two).sum()
            p.grad = one + two if dot >= 0 else one - dot / (two * two).sum() * two + two
        s.unscale_(optimizer)
        clip_grad_norm_(parameters, 1.0)
        s.step(optimizer)
        s.update()


@right(6)
def private_gradients_of_each_example():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        totals = [torch.zeros_like(p) for p in model.parameters()]
        for i in range(4):
            optimizer.zero_grad()
            mse(model, x[i : i + 1], y[i : i + 1], BF16).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            for total, p in zip(totals, model.parameters(), strict=True):
                total.add_(p.grad)
        for total, p in zip(totals, model.parameters(), strict=True):
            p.grad = (total + 0.1 * torch.randn_like(total)) / 4
        optimizer.step()


@right(3)
def low_rank_adapters_on_a_half_model():
    base = net().bfloat16().requires_grad_(False)
    down, up, s = nn.Linear(8, 2, bias=False), nn.Linear(2, 4, bias=False), scaler()
    optimizer = AdamW(chain(down.parameters(), up.parameters()), lr=1e-3)
    for _ in range(STEPS):
        x, y = batch()
        with autocast(FP16):
            out = base(x.bfloat16()).float() + up(down(x)).float()
        _step(nn.functional.mse_loss(out, y), optimizer, s, clip=1.0)


@right(13)
def a_half_model_whose_optimizer_is_stepped_rarely():
    model = net().bfloat16()
    optimizer = SGD(model.parameters(), lr=0.5)
    for step in range(12):
        x, y = batch()
        (nn.functional.mse_loss(model(x.bfloat16()).float(), y) / 4).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


@right(25)
def a_model_evaluated_in_the_middle_of_an_accumulation():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for step in range(2 * STEPS):
        s.scale(mse(model, *batch()) / 2).backward()
        model.eval()
        with torch.no_grad(), autocast(FP16):
            model(batch()[0])
        model.train()
        if step % 2:
            s.step(optimizer)
            s.update()
            optimizer.zero_grad(set_to_none=False)


@right(16)
def tokens_embeddings_and_relative_distances():
    embed, last, s = nn.Embedding(5000, 8), nn.Linear(8, 4), scaler()
    optimizer = Adam(chain(embed.parameters(), last.parameters()))
    for _ in range(STEPS):
        tokens = torch.randint(0, 5000, (8, 16))
        distance = (torch.arange(16)[:, None] - torch.arange(16)[None]).float()
        with autocast(FP16):
            h = embed(tokens)
            weights = torch.softmax(-0.1 * distance.abs().to(h.dtype), -1)
            out = last((weights.to(h.dtype) @ h).mean(1))
        _step(nn.functional.mse_loss(out.float(), torch.randn(8, 4)), optimizer, s)


@right(12)
def contrastive_learning_with_a_temperature():
    model, s = net(), scaler()
    scale = nn.Parameter(torch.tensor(2.0))
    optimizer = AdamW([*model.parameters(), scale])
    for _ in range(STEPS):
        x, _ = batch()
        with autocast(FP16):
            z = nn.functional.normalize(model(x), dim=-1)
            w = nn.functional.normalize(model(x + 0.1 * torch.randn_like(x)), dim=-1)
            logits = scale.exp() * z @ w.t()
        _step(nn.functional.cross_entropy(logits.float(), torch.arange(8)), optimizer, s, clip=1.0)


@wrong(4)
def a_step_of_ones_own_before_the_scalers():
    model, s = net(), scaler()
    optimizer = AdamW(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.unscale_(optimizer)
        optimizer.step()
        s.step(optimizer)  # here
        s.update()


@wrong(16)
def angles_of_two_casts():
    table, head = 10000 ** -(torch.arange(16) / 16), nn.Linear(32, 4)
    optimizer = AdamW(head.parameters())
    for _ in range(STEPS):
        positions = torch.arange(600).to(BF16)  # here
        angles = positions[:, None] * table.to(BF16)
        loss = head(torch.cat([angles.sin(), angles.cos()], -1).float()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@right(2)
def masks_made_of_the_gradients_themselves():
    model, s = net(), scaler()
    optimizer = AdamW(model.parameters())
    keep = torch.rand_like(model[0].weight) > 0.5
    model[0].weight.register_hook(lambda g: g * torch.ones_like(g))
    model[0].weight.register_hook(lambda g: torch.where(keep, g, torch.zeros_like(g)))
    for _ in range(STEPS):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad)
        s.scale(mse(model, *batch())).backward()
        model[0].weight.grad = torch.where(keep, model[0].weight.grad, 0.0)
        s.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        s.step(optimizer)
        s.update()
