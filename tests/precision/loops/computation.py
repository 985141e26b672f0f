"""Mistakes of what is computed in which precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.utils.checkpoint import checkpoint

from precision.loops import right, wrong
from precision.loops.parts import BF16, FP16, autocast, batch, mse, net, scaler

STEPS = 5


# ---- 7 fp16 without scaling ----------------------------------------------------------------------


@wrong(7)
def fp16_without_scaling():
    model = net()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        mse(model, *batch()).backward()  # here
        optimizer.step()


@right(7)
def constant_scale_by_hand():
    model = net()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        (mse(model, *batch()) * 1024).backward()
        for p in model.parameters():
            p.grad.mul_(1 / 1024)
        optimizer.step()


@right(7)
def bf16_without_scaling():
    model = net()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        mse(model, *batch(), dtype=BF16).backward()
        optimizer.step()


@right(7)
def fp32_training_with_fp16_validation():
    model = net()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        with torch.no_grad(), autocast(FP16):
            model(x)


# ---- 9, 10 autocast's cache ----------------------------------------------------------------------


@wrong(9)
def region_around_the_loop():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with autocast(BF16):  # here
        for _ in range(STEPS):
            x, y = batch()
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x).float(), y)
            loss.backward()
            optimizer.step()


@right(9)
def region_per_iteration_with_everything_inside():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        with autocast(BF16):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x).float(), y).backward()
            optimizer.step()


@right(9)
def region_around_the_loop_without_a_cache():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with autocast(BF16, cache_enabled=False):
        for _ in range(STEPS):
            x, y = batch()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x).float(), y).backward()
            optimizer.step()


@right(9)
def cache_cleared_after_each_step():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with autocast(BF16):
        for _ in range(STEPS):
            x, y = batch()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x).float(), y).backward()
            optimizer.step()
            torch.clear_autocast_cache()


class _CachingLinear(nn.Linear):
    """Keeps a copy of its weight from a forward pass without gradients, as autocast did before torch 2.11."""

    copy: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.copy = self.weight.detach().bfloat16()
        weight = self.weight.bfloat16() if self.copy is None else self.copy
        self.copy = self.copy if not torch.is_grad_enabled() else None
        return nn.functional.linear(x.bfloat16(), weight)


@wrong(10)
def forward_without_gradients_first():
    first, last = nn.Linear(8, 8), _CachingLinear(8, 4, bias=False)
    optimizer = SGD([*first.parameters(), *last.parameters()], lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        h = first(x)
        with autocast(BF16):
            with torch.no_grad():
                last(h)
            out = last(h)  # here
        nn.functional.mse_loss(out.float(), y).backward()
        optimizer.step()


@right(10)
def forward_without_gradients_first_in_its_own_region():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        with torch.no_grad(), autocast(BF16):
            target = model(x).float()
        with autocast(BF16):
            out = model(x)
        nn.functional.mse_loss(out.float(), y + 0.1 * target).backward()
        optimizer.step()


@right(10)
def teacher_whose_output_is_detached():
    model, teacher = net(), net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, _ = batch()
        optimizer.zero_grad()
        with autocast(BF16, cache_enabled=False):
            with torch.no_grad():
                teacher(x)
            target = teacher(x).detach()
            out = model(x)
        nn.functional.mse_loss(out.float(), target.float()).backward()
        optimizer.step()


# ---- 11 loss in half -----------------------------------------------------------------------------


@wrong(11)
def loss_in_half():
    model, s = net(), scaler(init_scale=256.0)
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        y = y.half()
        optimizer.zero_grad()
        with autocast(FP16):
            out = model(x)
        loss = ((out - y) ** 2).mean()  # here
        s.scale(loss).backward()
        s.step(optimizer)
        s.update()


@wrong(11)
def finished_loss_cast_to_float():
    model = net()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        with autocast(BF16):
            loss = (model(x) - y.bfloat16()).abs().mean()  # here
        (loss.float() / 1.0).backward()
        optimizer.step()


@right(11)
def output_cast_before_the_loss():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        with autocast(FP16):
            out = model(x)
        loss = ((out.float() - y) ** 2).mean()
        s.scale(loss).backward()
        s.step(optimizer)
        s.update()


@right(11)
def loss_in_an_fp32_island():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        with autocast(FP16):
            out = model(x)
            with autocast(enabled=False):
                loss = (out.float() - y).pow(2).sum() / 32
        s.scale(loss).backward()
        s.step(optimizer)
        s.update()


# ---- 12 reductions, 30 masks, 31 norms -----------------------------------------------------------


class _Scaled(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), norm, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(300.0 * (self.first(x) + 2.0)))


def _train(model: nn.Module, dtype: torch.dtype = FP16, steps: int = STEPS) -> None:
    torch.manual_seed(0)
    s = scaler(init_scale=1024.0, enabled=dtype == FP16)
    optimizer = AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        s.scale(mse(model, *batch(), dtype=dtype)).backward()
        s.step(optimizer)
        s.update()


@wrong(12)
def squares_overflow_in_a_norm_by_hand():
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + 1e-6)  # here

    _train(_Scaled(Norm()))


@wrong(12)
def logarithm_of_probabilities():
    class Entropy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            p = torch.softmax(x, -1)
            return torch.nan_to_num(p * p.log())  # here

    _train(_Scaled(Entropy()))


@wrong(12)
def sum_of_large_differences():
    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            total = (x.half() * 20).abs().sum()  # here
            return x + 0 * total.nan_to_num(0.0, 0.0)

    _train(_Scaled(Sum()))


@right(12)
def fused_norms_in_half():
    _train(_Scaled(nn.Sequential(nn.LayerNorm(16), nn.RMSNorm(16), nn.Softmax(-1))))
    _train(_Scaled(nn.LayerNorm(16)), BF16)


@right(12)
def means_and_sums_in_half():
    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (
                x / 300 - (x / 300).mean(-1, keepdim=True) + (x / 300).cumsum(-1).sum(-1, keepdim=True) / 256
            )

    _train(_Scaled(Pool()))
    _train(_Scaled(Pool()), BF16)


class _Attention(nn.Module):
    softmax_dtype: torch.dtype | None = None

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def mask(self, causal: Tensor, padding: Tensor) -> Tensor:
        raise NotImplementedError

    def weights(self, scores: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(scores + mask, -1, dtype=self.softmax_dtype).to(scores.dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        scores = h @ h.transpose(-1, -2)
        causal = torch.ones(8, 8, dtype=torch.bool).triu(1)
        padding = (torch.arange(8) >= 6).expand(8, 8)
        return (self.weights(scores, self.mask(causal, padding).to(scores.dtype)) @ h)[:, :4]


@wrong(30)
def masks_that_add_up_to_infinity():
    class Attention(_Attention):
        def mask(self, causal: Tensor, padding: Tensor) -> Tensor:
            least = torch.finfo(FP16).min
            return causal.half() * least + padding.half() * least  # here

    _train(Attention())


@wrong(30)
def masks_that_add_up_to_infinity_before_a_softmax_in_fp32():
    class Attention(_Attention):
        softmax_dtype = torch.float32

        def mask(self, causal: Tensor, padding: Tensor) -> Tensor:
            least = torch.finfo(FP16).min
            return causal.half() * least + padding.half() * least  # here

    _train(Attention())


@right(30)
def boolean_masks_and_infinite_ones():
    class Boolean(_Attention):
        def mask(self, causal: Tensor, padding: Tensor) -> Tensor:
            return (causal | padding).half() * (torch.finfo(FP16).min / 2)

    class Infinite(_Attention):
        def mask(self, causal: Tensor, padding: Tensor) -> Tensor:
            return torch.zeros(8, 8, dtype=FP16).masked_fill(causal | padding, -torch.inf)

    _train(Boolean())
    _train(Infinite())


@right(30)
def attention_of_a_library_with_both_masks():
    model, s = nn.MultiheadAttention(16, 2, batch_first=True), scaler()
    optimizer = Adam(model.parameters())
    padding = (torch.arange(8) >= 6).expand(2, 8)
    causal = nn.Transformer.generate_square_subsequent_mask(8)
    for _ in range(STEPS):
        x = torch.randn(2, 8, 16)
        optimizer.zero_grad()
        with autocast(FP16):
            out, _ = model(x, x, x, key_padding_mask=padding, attn_mask=causal)
        s.scale(out.float().square().mean()).backward()
        s.step(optimizer)
        s.update()


@wrong(31)
def norm_of_gradients_in_half():
    model, s = net(), scaler()
    optimizer = SGD(model.parameters(), lr=1e-9)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        s.scale(mse(model, x, y)).backward()
        s.unscale_(optimizer)
        for p in model.parameters():
            p.grad.fill_(20000.0)
        norms = [p.grad.half().norm() for p in model.parameters()]  # here
        torch.stack(norms).norm()
        s.step(optimizer)
        s.update()


@right(31)
def norm_of_gradients_in_single():
    model, s = net(), scaler()
    optimizer = SGD(model.parameters(), lr=1e-9)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        s.scale(mse(model, x, y)).backward()
        s.unscale_(optimizer)
        for p in model.parameters():
            p.grad.fill_(20000.0)
        torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        s.step(optimizer)
        s.update()


# ---- 16 integers ---------------------------------------------------------------------------------


class _Rotary(nn.Module):
    def __init__(self, island: bool, positions: int = 1000) -> None:
        super().__init__()
        self.inner, self.island, self.positions = nn.Linear(8, 4), island, positions

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(self.positions)[:, None]
        inverse = 1.0 / 100 ** (torch.arange(4)[None] / 4)
        if self.island:
            with autocast(enabled=False):
                freqs = positions.float() @ inverse.float()
        else:
            freqs = positions.float() @ inverse  # here
        return self.inner(x) + freqs.sin()[: len(x)]


@wrong(16)
def positions_merge_under_autocast():
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(1000)[:, None]
            freqs = positions.float() @ (1.0 / 100 ** (torch.arange(4)[None] / 4))  # here
            return self.inner(x) + freqs.sin()[: len(x)]

    _train(Rotary(), BF16)


@wrong(16)
def timesteps_merge_under_autocast():
    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.time = nn.Linear(8, 4), nn.Linear(1, 4)

        def forward(self, x: Tensor) -> Tensor:
            t = torch.randint(0, 1000, (512, 1)).float()
            return self.inner(x) + self.time(t)[: len(x)]  # here

    _train(Conditioned(), BF16)


@right(16)
def positions_in_an_island_and_short_ones():
    _train(_Rotary(island=True), BF16)
    _train(_Rotary(island=False, positions=200), BF16)


# ---- 17 backward ---------------------------------------------------------------------------------


@wrong(17)
def function_without_decorators():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w  # here

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g.float() @ w.float().t(), x.float().t() @ g.float()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            return Product.apply(x, self.w)

    _train(Model(), BF16)


@right(17)
def function_with_decorators():
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w.t(), x.t() @ g

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            return Product.apply(x, self.w)

    _train(Model(), BF16)


@wrong(17)
def recomputation_in_another_type():
    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w  # here

        @staticmethod
        def backward(ctx, g):
            x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
            with torch.enable_grad(), torch.autocast("cpu"):  # here
                out = x @ w
            return torch.autograd.grad(out, (x, w), g.to(out.dtype))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            return Recompute.apply(x, self.w)

    _train(Model(), FP16)


@right(17)
def activation_checkpointing_in_both_modes():
    class Model(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.inner, self.reentrant = net(), reentrant

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)

    _train(Model(False))
    _train(Model(True))


# ---- 25 evaluation -------------------------------------------------------------------------------


@wrong(25)
def evaluation_without_a_region():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        model.train()
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)
        s.update()
        model.eval()
        with torch.no_grad():
            model(batch()[0])  # here


@right(25)
def evaluation_in_the_same_region():
    model, s = net(), scaler()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        model.train()
        optimizer.zero_grad()
        s.scale(mse(model, *batch())).backward()
        s.step(optimizer)
        s.update()
        model.eval()
        with torch.no_grad(), autocast(FP16):
            model(batch()[0])


@right(25)
def model_that_enters_its_own_region():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        @torch.autocast("cpu", dtype=BF16)
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = Model()
    optimizer = Adam(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        model.train()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x).float(), y).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(x)


# ---- 26 origin -----------------------------------------------------------------------------------


@wrong(26)
def layer_that_overflows():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x) * 1e5  # here
            return self.last(h - h.amax())

    _train(Model(), FP16, steps=8)


@wrong(26)
def nan_without_a_scaler():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = nn.Linear(8, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x).float()
            return torch.sqrt(h - 100.0)  # here

    model = Model()
    optimizer = SGD(model.parameters(), lr=0.0)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        with autocast(BF16):
            loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        for p in model.parameters():
            p.grad.nan_to_num_(0.0)
        optimizer.step()
