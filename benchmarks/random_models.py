"""Random models, changed wherever that is possible, are used at random beside the plain ones.

    python benchmarks/random_models.py --models 1000 --seed 0

Each model is planned with every fix that can be made, whether it pays or not, and then used in a few random
ways: other modes, precisions and batches, views, hooks, partial calls, threads, reloads, training steps.
Outputs, gradients, buffers and errors are compared. Every difference is printed with the seed that gives it
(``--seed SEED --models 1`` shows it again), and at the end how many models had which fixes.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fixable import WrittenGelu
from in_use import applied, difference, on_meta, outcome, planned
from tilefit.errors import TilefitError

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.3}
#: Of optimizers: with a small one, gradients that are zero but for rounding would move parameters.
EPSILON = 1e-3
#: A guard: no plan takes nearly so long.
BUDGET_S = 20.0
WIDTHS = (5, 8, 12, 13, 16, 17, 24, 31)
Rng = random.Random


# ---- parts: [batch, time, width] to [batch, time, width] ---------------------------------------


class WrittenSilu(nn.Module):
    """SiLU, written out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


class Norm(nn.Module):
    """Root-mean-square normalization, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width) + 0.5), 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, WrittenGelu, WrittenSilu),
    *(
        lambda: nn.Softmax(-1),
        lambda: nn.Dropout(0.2),
        lambda: nn.Dropout(0.0),
        nn.Identity,
        lambda: nn.ReLU(inplace=True),
    ),
)


class Perceptron(nn.Module):
    """Two or three layers; keeps what is between them, and returns it where ``flag`` is set."""

    def __init__(self, rng: Rng, width: int) -> None:
        super().__init__()
        inner, bias = rng.choice(WIDTHS), rng.random() < 0.7
        self.up, self.act = nn.Linear(width, inner, bias), rng.choice(ACTIVATIONS)()
        self.gate = nn.Linear(width, inner, bias) if rng.random() < 0.4 else None
        self.down, self.keeps, self.flag = nn.Linear(inner, width, bias), rng.random() < 0.3, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.up(x))
        if self.gate is not None:
            y = y * self.gate(x)
        if self.keeps:
            self.kept = y
        return y.mean(-1, keepdim=True) + x if self.flag else x + self.down(y)


class SelfAttention(nn.Module):
    """Attention, by hand or not, of separate projections or not, causal or not."""

    def __init__(self, rng: Rng, width: int) -> None:
        super().__init__()
        self.heads, inner = rng.choice((1, 2)), 2 * rng.choice((4, 5, 8))
        self.merged, self.by_hand = rng.random() < 0.3, rng.random() < 0.7
        self.keeps, self.fill = rng.random() < 0.2, rng.choice((float("-inf"), -1e9, -1e4))
        if self.merged:
            self.qkv = nn.Linear(width, 3 * inner)
        else:
            self.q, self.k, self.v = (nn.Linear(width, inner, rng.random() < 0.5) for _ in range(3))
        self.out = nn.Linear(inner, width)
        self.drop = nn.Dropout(rng.choice((0.0, 0.1)))
        self.register_buffer("mask", torch.tril(torch.ones(32, 32)) if rng.random() < 0.5 else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, -1) if self.merged else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mask = None if self.mask is None else self.mask[: x.shape[1], : x.shape[1]] == 0
        if self.by_hand:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            scores = scores if mask is None else scores.masked_fill(mask, self.fill)
            weights = self.drop(scores.softmax(-1))
            if self.keeps:
                self.kept = weights
            y = weights @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, None if mask is None else ~mask)
        return x + self.out(y.transpose(1, 2).flatten(-2))


class Asked(nn.Module):
    """PyTorch's attention, asked for weights that nobody reads unless they are kept."""

    def __init__(self, rng: Rng, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1, bias=rng.random() < 0.7, batch_first=True)
        self.keeps, self.masks = rng.random() < 0.2, rng.random() < 0.4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.new_full((x.shape[1],) * 2, -torch.inf).triu(1) if self.masks else None
        y, weights = self.attention(x, x, x, attn_mask=mask)
        if self.keeps:
            self.kept = weights
        return x + y


class Images(nn.Module):
    """Convolutions over [batch, width, time, 2], odd channels between them."""

    def __init__(self, rng: Rng, width: int) -> None:
        super().__init__()
        inner = rng.choice((3, 5, 6, 8, 12))
        self.first = nn.Conv2d(width, inner, rng.choice((1, 3)), padding="same", bias=rng.random() < 0.5)
        self.norm = rng.choice((nn.BatchNorm2d(inner), nn.GroupNorm(1, inner), nn.Identity()))
        self.act = rng.choice((nn.ReLU(), nn.SiLU(), nn.ReLU(inplace=True)))
        self.second = nn.Conv2d(inner, width, 3, padding=1)
        self.keeps, self.flag = rng.random() < 0.3, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.norm(self.first(torch.stack([x, -x], -1).transpose(1, 2))))
        if self.keeps:
            self.kept = y
        if self.flag:
            return x + y.mean((1, 3))[..., None]
        return x + self.second(y).mean(-1).transpose(1, 2)


class Loop(nn.Module):
    """A state that goes from step to step, with ``stop`` fewer steps."""

    def __init__(self, rng: Rng, width: int) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.unbinds, self.stop = rng.random() < 0.5, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, states = x.new_zeros(x.shape[0], x.shape[2]), []
        steps = x.unbind(1) if self.unbinds else [x[:, t] for t in range(x.shape[1])]
        for step in steps[: len(steps) - self.stop]:
            h = torch.tanh(self.x(step) + self.h(h))
            states.append(h)
        return x + F.pad(torch.stack(states, 1), (0, 0, 0, self.stop))


class Layer(nn.Module):
    """One of PyTorch's recurrent layers."""

    def __init__(self, rng: Rng, width: int) -> None:
        super().__init__()
        kind = rng.choice((nn.LSTM, nn.GRU, nn.RNN))
        self.body = kind(width, width, batch_first=True, bidirectional=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)[0]


class Twice(nn.Module):
    """One part, called twice."""

    def __init__(self, rng: Rng, width: int) -> None:
        super().__init__()
        self.part = rng.choice((Perceptron, SelfAttention, Loop))(rng, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(torch.tanh(self.part(x)))


class Encoder(nn.Module):
    """PyTorch's encoder layer, with or without masks, its heads odd or not."""

    def __init__(self, rng: Rng, width: int) -> None:
        super().__init__()
        heads = rng.choice([n for n in (1, 2, 3, 4) if width % n == 0])
        self.batch_first = rng.random() < 0.6
        self.layer = nn.TransformerEncoderLayer(
            width, heads, rng.choice(WIDTHS), rng.choice((0.0, 0.0, 0.1)), batch_first=self.batch_first,
            norm_first=rng.random() < 0.5, bias=rng.random() < 0.8,
        )  # fmt: skip
        self.masks, self.pads, self.hint = (rng.random() < 0.4 for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        mask = x.new_full((length, length), -torch.inf).triu(1) if self.masks else None
        lengths = torch.arange(x.shape[0], device=x.device)[:, None] + 2
        pads = torch.arange(length, device=x.device)[None] >= lengths if self.pads else None
        y = x if self.batch_first else x.transpose(0, 1)
        y = self.layer(y, mask, pads, is_causal=self.masks and self.hint)
        return y if self.batch_first else y.transpose(0, 1)


PARTS = (
    Perceptron,
    Perceptron,
    SelfAttention,
    SelfAttention,
    Asked,
    Encoder,
    Images,
    Images,
    Loop,
    Layer,
    Twice,
)


class Model(nn.Module):
    """Parts, and heads that read the last one's output; ``task`` calls one head alone."""

    def __init__(self, rng: Rng) -> None:
        super().__init__()
        self.features, width = rng.choice(WIDTHS), rng.choice(WIDTHS)
        self.stem = nn.Linear(self.features, width)
        parts = [rng.choice(PARTS)(rng, width) for _ in range(rng.choice((1, 1, 1, 1, 2)))]
        norms = [rng.choice((nn.LayerNorm(width), Norm(width), nn.Identity())) for _ in parts]
        self.body = nn.Sequential(*(module for pair in zip(norms, parts, strict=True) for module in pair))
        self.heads = nn.ModuleDict(
            {n: nn.Linear(width, rng.choice(WIDTHS)) for n in "abc"[: rng.choice((1, 1, 2, 3))]}
        )
        for parameter in self.parameters():
            parameter.requires_grad_(rng.random() < 0.95)

    def forward(self, x: torch.Tensor, task: str = "") -> Any:
        z = self.body(self.stem(x))
        return self.heads[task](z) if task else tuple(head(z) for head in self.heads.values())


#: What may be done to a model that has such a part.
FIXES: dict[type[nn.Module], tuple[str, ...]] = {
    Perceptron: ("pad-linear",),
    SelfAttention: ("pad-linear", "fuse-attention", "fuse-attention"),
    Asked: ("fuse-attention",),
    Encoder: ("fit-heads", "fit-heads", "pad-linear"),
    Images: ("pad-channels", "pad-channels", "channels-last"),
    Loop: ("pad-linear",),
    Layer: ("persistent-kernels",),
    Norm: ("compile-parts",),
    WrittenGelu: ("compile-parts",),
    WrittenSilu: ("compile-parts",),
    Model: ("pad-linear",),
}


# ---- uses --------------------------------------------------------------------------------------


@dataclass
class Setting:
    """How a pair of models is used: choices that both share.

    Attributes:
        rng: Of the choices; each model gets its own copy in the same state.
        model: One of the two.
        dtype: Of its parameters.
    """

    rng: Rng
    model: Model
    dtype: torch.dtype = torch.float64

    def input(self, batch: int = 0) -> torch.Tensor:
        """A new one: contiguous or not, a view or not, to be differentiated or not."""
        batch = batch or self.rng.choice((1, 2, 3, 5))
        sizes = (batch, self.rng.choice((4, 7, 18)), self.model.features)
        generator = torch.Generator().manual_seed(self.rng.randrange(1 << 30))
        x = torch.randn(sizes, generator=generator, dtype=torch.float64).to(self.dtype)
        how = self.rng.randrange(6)
        if how == 1:
            x = torch.cat([x, x], 2)[..., ::2] if x.shape[2] > 1 else x
        elif how == 2:
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        elif how == 3:
            x = x.flatten(0, 1).view(sizes)
        elif how == 4:
            x = x.clone().requires_grad_().view_as(x)
        return x.requires_grad_() if how == 5 else x

    def part(self) -> nn.Module:
        """Any of its parts that are called with what the body is called with."""
        return self.rng.choice([self.model.body, *self.model.body])

    def state(self, *more: Any) -> Any:
        """What the model returned, its gradients and buffers, and what it keeps."""
        gradients = {n: p.grad for n, p in self.model.named_parameters()}
        kept = {n: m.kept for n, m in self.model.named_modules() if hasattr(m, "kept")}
        return more, gradients, dict(self.model.named_buffers()), kept


def loss_of(y: Any) -> torch.Tensor:
    """A number that every result counts in, once and squared."""
    results = y if isinstance(y, tuple) else (y,)
    return sum(((each + 0.1).square().mean() for each in results), torch.zeros(()))


Scenario = Callable[[Setting], Any]
SCENARIOS: dict[str, Scenario] = {}


def scenario(use: Scenario) -> Scenario:
    """Enter a scenario by its name."""
    SCENARIOS[use.__name__] = use
    return use


@scenario
def trained(s: Setting) -> Any:
    x = s.input()
    y = s.model(x)
    loss_of(y).backward()
    return s.state(y, x.grad if x.is_leaf else None)


@scenario
def evaluated(s: Setting) -> Any:
    s.model.eval()
    with s.rng.choice((torch.no_grad, torch.enable_grad, torch.inference_mode))():
        return [s.model(s.input(batch)) for batch in (4, 1, 3)]


@scenario
def input_differentiated(s: Setting) -> Any:
    x = s.input().requires_grad_()
    view = x.view_as(x) if s.rng.random() < 0.5 else x[:]
    seen: list[Any] = []
    view.register_hook(seen.append)
    return torch.autograd.grad(loss_of(s.model(view)), (x, view), allow_unused=True), seen


@scenario
def input_written_to(s: Setting) -> Any:
    x = s.input().detach().clone()
    results = []
    for _ in range(3):
        with torch.no_grad():
            results.append(s.model(x))
            if s.rng.random() < 0.5:
                x.mul_(-2)
            else:
                x.data.add_(1)
    return results


@scenario
def input_written_to_before_the_backward_pass(s: Setting) -> Any:
    x = s.input().detach().clone()
    y = s.model(x)
    with torch.no_grad():
        x.mul_(-2)
    loss_of(y).backward()
    return s.state(y)


@scenario
def not_finite(s: Setting) -> Any:
    s.model.eval()
    x = s.input().detach().clone()
    with torch.no_grad():
        z = s.model.stem(x)
        x.view(-1)[0], z.view(-1)[-1] = s.rng.choice((torch.inf, -torch.inf, torch.nan)), torch.inf
        return s.model(x), s.part()(z)


@scenario
def parts_alone(s: Setting) -> Any:
    z = s.model.stem(s.input())
    y = s.part()(z)
    leaves = [m for m in s.model.modules() if isinstance(m, nn.Linear)]
    chosen = s.rng.choice(leaves)
    return y, chosen(torch.ones(3, chosen.in_features, dtype=s.dtype)), s.model(s.input())


@scenario
def one_head(s: Setting) -> Any:
    x, tasks = s.input(), list(s.model.heads)
    optimizer = torch.optim.AdamW(s.model.parameters(), 0.01, eps=EPSILON, weight_decay=0.1)
    results = []
    for _ in range(3):
        optimizer.zero_grad()
        y = s.model(x.detach(), s.rng.choice(tasks))
        loss_of(y).backward()
        results.append(s.state(y.detach().clone()))
        optimizer.step()
    return results, dict(s.model.named_parameters())


@scenario
def siblings_in_part(s: Setting) -> Any:
    x = s.model.stem(s.input()).detach()
    results = []
    with torch.no_grad():
        for attention in (m for m in s.model.modules() if hasattr(m, "q")):
            for name in s.rng.sample("qkv", 2):
                results.append(getattr(attention, name)(x))
                attention.k.weight.data = attention.k.weight.data * 1.5
                attention.v.load_state_dict({n: -p for n, p in attention.v.state_dict().items()})
            results.append(attention(x))
    return results, s.model(s.input())


@scenario
def hooked(s: Setting) -> Any:
    seen: list[Any] = []
    for name, module in s.model.named_modules():
        if s.rng.random() < 0.3:
            module.register_forward_hook(lambda _, given, y, n=name: seen.append((n, given, y)))
        elif s.rng.random() < 0.2:
            module.register_forward_hook(lambda _, given, y: y * 1.1 if isinstance(y, torch.Tensor) else None)
    y = s.model(s.input())
    loss_of(y).backward()
    return s.state(y, seen)


@scenario
def flipped(s: Setting) -> Any:
    results = [s.model(s.input())]
    for module in s.model.modules():
        if hasattr(module, "flag"):
            module.flag = s.rng.random() < 0.8
            module.keeps = not module.keeps
        if hasattr(module, "stop"):
            module.stop = s.rng.randrange(3)
        if hasattr(module, "fill"):
            module.mask = None if s.rng.random() < 0.3 else module.mask
    return s.state(*results, s.model(s.input()))


@scenario
def parts_replaced(s: Setting) -> Any:
    for module in s.model.modules():
        if hasattr(module, "act") and not isinstance(module, Images):
            module.act = s.rng.choice((nn.Softmax(-1), nn.Tanh(), nn.Hardtanh()))
    name = s.rng.choice(list(s.model.heads))
    old: nn.Linear = s.model.heads[name]
    s.model.heads[name] = nn.Linear(old.in_features, 3).to(s.dtype)
    nn.init.constant_(s.model.heads[name].weight, 0.3)
    nn.init.constant_(s.model.heads[name].bias, 0.1)
    return s.model(s.input())


@scenario
def reloaded(s: Setting) -> Any:
    x = s.input().detach()
    with torch.no_grad():
        results = [s.model(x)]
        values = {n: v * 1.5 if v.is_floating_point() else v for n, v in s.model.state_dict().items()}
        s.model.load_state_dict(values, assign=s.rng.random() < 0.3)
        return [*results, s.model(x)]


@scenario
def optimized(s: Setting) -> Any:
    learning = [p for p in s.model.parameters() if p.requires_grad]
    kind = s.rng.choice((torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad))
    optimizer = kind(learning, 0.01) if kind is torch.optim.SGD else kind(learning, 0.01, eps=EPSILON)
    x, losses = s.input().detach(), []
    for _ in range(3):
        optimizer.zero_grad(set_to_none=s.rng.random() < 0.5)
        losses.append(loss_of(s.model(x)))
        losses[-1].backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        optimizer.step()
    return s.state(losses), dict(s.model.named_parameters())


@scenario
def threaded(s: Setting) -> Any:
    inputs = [s.input() for _ in range(3)]
    results: list[Any] = [None] * 3
    s.model.eval()

    def work(number: int) -> None:
        with torch.no_grad():
            results[number] = [s.model(inputs[number]) for _ in range(4)]

    workers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


@scenario
def copied(s: Setting) -> Any:
    s.model = copy.deepcopy(s.model)
    return trained(s)


@scenario
def frozen(s: Setting) -> Any:
    for parameter in s.model.parameters():
        parameter.requires_grad_(s.rng.random() < 0.5)
    y = s.model(s.input())
    if loss_of(y).requires_grad:
        loss_of(y).backward()
    return s.state(y)


@scenario
def differentiated_twice(s: Setting) -> Any:
    s.model.eval()
    x = s.input(2).detach().requires_grad_()
    (first,) = torch.autograd.grad(loss_of(s.model(x)), x, create_graph=True, allow_unused=True)
    learning = [p for p in s.model.parameters() if p.requires_grad]
    return first, torch.autograd.grad(first.square().sum(), [x, *learning], allow_unused=True)


@scenario
def of_wrong_sizes(s: Setting) -> Any:
    def result(module: nn.Module, sizes: tuple[int, ...]) -> Any:
        try:
            return module(torch.ones(sizes, dtype=s.dtype))
        except Exception as error:  # noqa: BLE001 - it is what is compared
            return type(error).__name__

    s.model.eval()
    layers = [m for m in s.model.modules() if isinstance(m, nn.Linear)]
    chosen = s.rng.choice(layers)
    features = chosen.in_features + s.rng.choice((-3, -1, 1, 2, 3, 8))
    wrong = s.model.features + s.rng.choice((-1, 1, 3))
    return result(chosen, (2, 3, max(features, 1))), result(s.model, (2, 4, wrong))


# ---- a trial -----------------------------------------------------------------------------------


@dataclass
class Trial:
    """What came of one seed.

    Attributes:
        fixes: Names of those that were applied.
        differences: In words; empty if there were none.
    """

    fixes: set[str]
    differences: list[str]


def trial(seed: int, verify: bool = True, uses: int = 3) -> Trial:
    """Make, plan and use the model of a seed."""
    rng = Rng(seed)
    torch.manual_seed(seed)
    plain = Model(rng).double()
    model = copy.deepcopy(plain)
    try:
        fitting = [fix for module in plain.modules() for fix in FIXES.get(type(module), ())]
        chosen = sorted({rng.choice(fitting) for _ in range(rng.choice((1, 2, 2, 4)))})
        if "fit-heads" in chosen:  # under which dropout draws other random numbers, as it says
            for module in (*plain.modules(), *model.modules()):
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
                elif isinstance(module, nn.MultiheadAttention):
                    module.dropout = 0.0
        length = 16 if any(isinstance(module, Loop) for module in plain.modules()) else 6
        inputs = on_meta(rng.choice((2, 2, 512)), length, plain.features)
        plan = planned(model.float(), inputs, *chosen, verify=verify, budget=BUDGET_S)
    except TilefitError as error:
        return Trial(set(), [f"not planned: {error}"])
    model.double().load_state_dict(plain.state_dict())
    found = []
    for _ in range(uses):
        name, use = rng.choice(sorted(SCENARIOS.items()))
        dtype = rng.choice((*[torch.float64] * 4, torch.float32, torch.bfloat16))
        train, choices = rng.random() < 0.5, rng.randrange(1 << 30)
        pair = [Setting(Rng(choices), copy.deepcopy(m).to(dtype).train(train), dtype) for m in (plain, model)]
        first, second = (outcome(partial(_run, use, setting), setting.model) for setting in pair)
        if isinstance(second, Exception) and "tilefit.strip" in str(second):
            continue  # it is refused, and says what to do
        scale = 1e-3 * largest(first)
        if text := difference(first, second, TOLERANCES[dtype], scale):
            found.append(f"{name} ({dtype}, {'train' if train else 'eval'}): {text}")
    return Trial(applied(plan), found)


def _run(use: Scenario, setting: Setting, model: nn.Module) -> Any:
    return use(setting)


def largest(outcome: Any) -> float:
    """The largest norm of a tensor in an outcome: gradients that are zero but for rounding are compared with
    it."""
    leaves = torch.utils._pytree.tree_leaves(outcome)
    norms = [leaf.detach().double().norm().item() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return max((norm for norm in norms if math.isfinite(norm)), default=0.0)


def main() -> int:
    """Run the trials; 1 where something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-verify", action="store_true", help="apply fixes without their proof")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    differing, begin = 0, time.monotonic()
    for seed in range(options.seed, options.seed + options.models):
        result = trial(seed, verify=not options.no_verify)
        counts.update(result.fixes or {"nothing"})
        differing += bool(result.differences)
        for text in result.differences:
            print(f"seed {seed} [{', '.join(sorted(result.fixes))}] {text}", flush=True)
    seconds = time.monotonic() - begin
    print(f"{options.models} models in {seconds:.0f} s, {differing} differ")
    for name, count in counts.most_common():
        print(f"{count:6d}  {name}")
    return 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
