"""A changed model is used as no captured call shows it, and does what the plain model does.

Each function below is a use; the fix it is tried on must be applied, or may be refused where the model itself
shows what is to come (``refusable``; such a test is then skipped with the reason).
"""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import tilefit
from fixable import (
    IMAGES,
    ROWS,
    Attention,
    Padded,
    WrittenNorm,
    convolutions,
    linear,
)
from in_use import Case, applied, difference, gradients, ids, on_meta, outcome, planned, tried, use_of
from tilefit.errors import TilefitError
from tilefit.fixes.changes.behaviour import behaviours

CASES: list[Case] = []
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
IMAGE = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(4))
TOKENS = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(5))


def case(make: Callable[[], nn.Module], inputs: Any, *fixes: str, **options: Any) -> Any:
    """The decorated function is a use of the model."""
    return use_of(CASES, make, inputs, *fixes, **options)


# ---- padding stays within a call ---------------------------------------------------------------


class AutoEncoder(nn.Module):
    """A chain of layers that belong to two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 13), nn.ReLU())
        self.decoder = nn.Sequential(nn.Linear(13, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))


class Kept(nn.Module):
    """Keeps what is between two layers; returns it where ``flag`` is set."""

    def __init__(self, a: nn.Module, b: nn.Module, keeps: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.keeps, self.flag = a, b, keeps, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.a(x))
        if self.keeps:
            self.feature = y
        return y if self.flag else self.b(y)


def kept_linear(keeps: bool = True) -> nn.Module:
    return Kept(nn.Linear(16, 13), nn.Linear(13, 8), keeps)


def kept_images(keeps: bool = True) -> nn.Module:
    return Kept(nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1), keeps)


@case(AutoEncoder, ROWS, "pad-linear")
def parts_called_alone(m: Any) -> Any:
    return m(X), m.encoder(X), m.encoder[:1](X), m.encoder(X[:3]), m.decoder(m.encoder(X)), m.encoder[0](X)


@case(convolutions, IMAGES, "pad-channels", "channels-last")
def images_of_parts(m: Any) -> Any:
    m.eval()
    return [m[:end](IMAGE) for end in (1, 2, 3, 4)], m[3](F.relu(m[0](IMAGE)))


@case(kept_linear, ROWS, "pad-linear", refusable=True)
def features_kept(m: Any) -> Any:
    return m(X), m.feature


@case(kept_images, IMAGES, "pad-channels", refusable=True)
def images_kept(m: Any) -> Any:
    return m(IMAGE), m.feature


@case(lambda: kept_linear(False), ROWS, "pad-linear", refusable=True)
def features_asked_for_later(m: Any) -> Any:
    m.flag = True
    return m(X)


@case(lambda: kept_images(False), IMAGES, "pad-channels", refusable=True)
def images_asked_for_later(m: Any) -> Any:
    m.flag = True
    return m(IMAGE)


@case(lambda: linear(16, 13, 8), ROWS, "pad-linear")
def hooks_added_later(m: Any) -> Any:
    seen: list[Any] = []
    for layer in m:
        layer.register_forward_hook(lambda _, given, y: seen.append((given, y)))
    m(X)
    return seen


@case(convolutions, IMAGES, "pad-channels")
def hooks_on_images_added_later(m: Any) -> Any:
    seen: list[Any] = []
    for layer in m:
        layer.register_forward_hook(lambda _, given, y: seen.append((given, y)))
        layer.register_full_backward_hook(lambda _, i, o: seen.append((i, o)))
    m(IMAGE.clone().requires_grad_()).square().sum().backward()
    return seen


@case(lambda: linear(16, 13, 8, act=nn.ReLU), ROWS, "pad-linear")
def activation_replaced(m: Any) -> Any:
    m[1] = nn.Softmax(-1)
    softmax = m(X)
    m[1] = nn.LayerNorm(13)
    return softmax, m(X)


@case(lambda: linear(16, 13, 8), ROWS, "pad-linear")
def head_replaced(m: Any) -> Any:
    m[2] = nn.Linear(13, 5)
    nn.init.ones_(m[2].weight)
    nn.init.zeros_(m[2].bias)
    return m(X)


@case(convolutions, IMAGES, "pad-channels")
def normalization_replaced(m: Any) -> Any:
    m[1] = nn.GroupNorm(1, 6)
    return m(IMAGE)


@case(convolutions, IMAGES, "pad-channels")
def normalization_folded(m: Any) -> Any:
    m.eval()
    m[0] = nn.utils.fusion.fuse_conv_bn_eval(m[0], m[1])
    m[1] = nn.Identity()
    return m(IMAGE)


@case(convolutions, IMAGES, "pad-channels")
def sync_batch_norm(m: Any) -> Any:
    return nn.SyncBatchNorm.convert_sync_batchnorm(m).eval()(IMAGE)


@case(lambda: linear(16, 13, 8), ROWS, "pad-linear")
def layers_found_by_their_class(m: Any) -> Any:
    found = [type(part) is nn.Linear for part in m]
    m.apply(lambda part: nn.init.ones_(part.weight) if type(part) is nn.Linear else None)
    return found, m(X)


@case(lambda: linear(16, 13, 8), ROWS, "pad-linear")
def ragged_inputs(m: Any) -> Any:
    parts = [X[:3].clone(), X[3:].clone()]
    return m(torch.nested.nested_tensor(parts, layout=torch.jagged)).values()


class LargeTable(nn.Module):
    """More than twenty million parameters, of which hardly any compute; evaluation returns features."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table, self.how = nn.Embedding(330_000, 64), how
        self.body = nn.Linear(64, 16)
        self.projection = linear(16, 13, 8, act=nn.ReLU)
        self.net = convolutions()

    def forward(self, tokens: torch.Tensor, image: torch.Tensor | None = None) -> Any:
        z = self.body(self.table(tokens))
        if image is not None:
            parts = self.net if self.training else self.net[:3]
            return z.mean() + parts(image).mean((2, 3))
        if self.training:
            return self.projection(z)
        part = self.projection[1](self.projection[0](z))
        return part if self.how == "part" else (self.projection(z), self.projection[:2](z))


WORDS = torch.arange(24).view(4, 6)


@case(lambda: LargeTable("part"), WORDS, "pad-linear", refusable=True)
def a_large_model_evaluated_in_part(m: Any) -> Any:
    return m.train()(WORDS), m.eval()(WORDS)


@case(lambda: LargeTable("features"), WORDS, "pad-linear", refusable=True)
def a_large_model_with_features(m: Any) -> Any:
    return m.train()(WORDS), m.eval()(WORDS)


@case(
    lambda: LargeTable("image"), (on_meta(4096, 6, dtype=torch.long), IMAGES), "pad-channels", refusable=True
)
def a_large_model_of_images(m: Any) -> Any:
    return [tuple(m.train(mode)(WORDS[:2], IMAGE).shape) for mode in (True, False)]


# ---- wrong and other sizes ---------------------------------------------------------------------


@case(lambda: nn.Sequential(nn.Linear(13, 16)), on_meta(8, 13), "pad-linear")
def wrong_features(m: Any) -> Any:
    return tried(*(lambda n=n: m(torch.ones(8, n)) for n in (13, 16, 8, 24, 1)), lambda: m(torch.ones(13)))


@case(lambda: linear(16, 13, 8), ROWS, "pad-linear")
def wrong_features_between(m: Any) -> Any:
    return tried(*(lambda n=n: m[2](torch.ones(8, n)) for n in (13, 16, 12)))


@case(
    lambda: nn.Sequential(nn.Conv2d(3, 64, 7, stride=2, padding=3)),
    on_meta(256, 3, 224, 224),
    "pad-channels",
    select=["channels-last", "pad-channels"],
)
def wrong_channels(m: Any) -> Any:
    return tried(*(lambda n=n: m(torch.ones(2, n, 9, 9)) for n in (3, 4, 8, 1)))


@case(convolutions, IMAGES, "pad-channels")
def wrong_channels_between(m: Any) -> Any:
    m.eval()
    calls = (lambda part=part, n=n: m[part](torch.ones(2, n, 5, 5)) for part in (1, 3) for n in (6, 8, 16))
    return tried(*calls)


class Resized(nn.Module):
    """A transposed convolution that is told its size, by keyword or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(8, 6, 3, 2, 1)
        self.b = nn.ConvTranspose2d(6, 12, 3, 2, 1)

    def forward(self, x: torch.Tensor, told: bool = True) -> torch.Tensor:
        y = self.a(x)
        return self.b(y, output_size=x.shape[-2:]) if told else self.b(y)


@case(Resized, IMAGES, "pad-channels", refusable=True)
def transposed_to_a_size(m: Any) -> Any:
    image = torch.ones(2, 8, 9, 8)
    return m(image), m(image, told=False), m.b(m.a(image), [9, 8])


@case(
    lambda: nn.Sequential(nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.Conv2d(6, 8, 1)),
    IMAGES,
    "pad-channels",
    refusable=True,
)
def cumulative_statistics(m: Any) -> Any:
    return [m(IMAGE * scale) for scale in (1, 2, 3)], dict(m.named_buffers())


# ---- values ------------------------------------------------------------------------------------


class Exponential(nn.Module):
    """Overflows where a layer gives zero, which it does not for real columns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 13), nn.Linear(13, 8)
        nn.init.uniform_(self.a.bias, -100.5, -99.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.exp(self.a(x) + 100.0))


class ExponentialImages(Exponential):
    """The same for images."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 6, 1), nn.Conv2d(6, 8, 1)
        nn.init.uniform_(self.a.bias, -100.5, -99.5)


@case(Exponential, ROWS, "pad-linear", refusable=True)
def overflow_of_padding(m: Any) -> Any:
    y = m(X)
    y.sum().backward()
    return y, gradients(m)


@case(ExponentialImages, IMAGES, "pad-channels", refusable=True)
def overflow_of_padded_channels(m: Any) -> Any:
    y = m(IMAGE)
    y.sum().backward()
    return y, gradients(m)


def normalized(late: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), WrittenNorm(late=late), nn.Linear(64, 64))


WIDE_ROWS = on_meta(1 << 18, 64)


# ---- nothing is kept from call to call ---------------------------------------------------------


@case(Attention, on_meta(2, 8, 16), "fuse-attention")
def a_part_that_is_compiled_by_itself(m: Any) -> Any:
    torch.compiler.reset()
    m.qkv.compile(backend="eager")
    y = m(torch.ones(2, 8, 16))
    y.square().sum().backward()
    return y, gradients(m)


@case(convolutions, IMAGES, "channels-last")
def a_part_called_while_another_thread_is_in_the_model(m: Any) -> Any:
    inside, done, found = threading.Event(), threading.Event(), []

    def wait(*_: Any) -> None:
        inside.set()
        done.wait(60)

    handle = m[-1].register_forward_pre_hook(wait)
    other = threading.Thread(target=lambda: found.append(m(IMAGE)))
    other.start()
    inside.wait(60)
    handle.remove()
    alone = m[0](IMAGE)
    done.set()
    other.join()
    return alone, alone.stride(), found[0], found[0].stride()


# ---- attention ---------------------------------------------------------------------------------


def kept_weights(m: Any) -> Any:
    y = m(TOKENS)
    y.square().sum().backward()
    weights = m.weights
    if not isinstance(weights, torch.Tensor):
        return y, weights
    return (
        *(y, weights, weights.mean(), torch.stack([weights, weights]), weights.grad, gradients(m)),
        weights.detach().numpy().shape,
        tried(lambda: pickled(m)(TOKENS), lambda: copy.deepcopy(m)(TOKENS)),
    )


def pickled(m: nn.Module) -> Any:
    """A model, saved and loaded."""
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


CASES += [
    Case(f"weights_{keep}", make, on_meta(2, 8, 16), "fuse-attention", kept_weights, True)
    for keep in ("kept", "detached", "class", "gradient")
    for make in [lambda keep=keep: Attention(keep=keep)]
]


class Causal(nn.Module):
    """Attention under a mask that is a buffer, and one of tokens."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)))
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        q = k = v = x[:, None]
        length = x.shape[1]
        scores = q @ k.transpose(-2, -1) * 0.25
        scores = scores.masked_fill(self.mask[:length, :length] == 0, self.fill)
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None], self.fill)
        return self.out(scores.softmax(-1) @ v)


def masked_rows(m: Any) -> Any:
    padding = torch.zeros(3, 16, dtype=torch.bool)
    padding[0] = True
    padding[1, :4] = True
    return m(TOKENS, padding), m(TOKENS)


def mask_changed(m: Any) -> Any:
    results = [m(TOKENS)]
    m.mask.data.fill_(1)
    results.append(m(TOKENS))
    m.mask[:, 3] = 0
    results.append(m(TOKENS))
    m.mask = torch.triu(torch.ones(64, 64))
    return [*results, m(TOKENS)]


CASES += [
    Case(f"{use.__name__}_{fill:g}", make, on_meta(2, 8, 16), "fuse-attention", use, True)
    for fill in (float("-inf"), -1e9, -1e4, -50.0)
    for make in [lambda fill=fill: Causal(fill)]
    for use in (masked_rows, mask_changed)
]


@case(Padded, (on_meta(2, 8, 16), on_meta(2, 8, dtype=torch.bool)), "contiguous-masks", refusable=True)
def cache_written_to(m: Any) -> Any:
    cache = torch.zeros(3, 2, 8, 16).transpose(-1, -2)
    return m.eval()(TOKENS, torch.ones(3, 16, dtype=torch.bool), cache), cache


@pytest.mark.parametrize("fix", ["fuse-attention", "compile-parts"])
def test_a_fix_is_made_once(fix: str) -> None:
    model, rows = (Causal(-50.0), 16) if fix == "fuse-attention" else (normalized(late=True), 64)
    plan = planned(model, on_meta(2, 16, rows), fix, verify=False)  # for ever, if it is proposed again
    assert applied(plan) == {fix}
    assert len(plan.fixes) == 1
    assert torch.isfinite(model(torch.ones(3, 16, rows))).all()


# ---- tensors as users handle them --------------------------------------------------------------


@case(convolutions, IMAGES, "channels-last", "pad-channels")
def parameters_as_one_vector(m: Any) -> Any:
    m(IMAGE).square().sum().backward()
    return tried(
        lambda: nn.utils.parameters_to_vector(m.parameters()),
        lambda: [parameter.view(-1) for parameter in m.parameters()],
        lambda: [parameter.grad.view(-1) for parameter in m.parameters()],
        lambda: nn.utils.vector_to_parameters(
            torch.ones(sum(p.numel() for p in m.parameters())), m.parameters()
        ),
        lambda: dict(m.named_parameters()),
    )


@case(convolutions, IMAGES, "channels-last", "pad-channels")
def lbfgs(m: Any) -> Any:
    optimizer = torch.optim.LBFGS(m.eval().parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = m(IMAGE).square().mean()
        loss.backward()
        return loss

    return tried(lambda: optimizer.step(closure)), dict(m.named_parameters())


@case(convolutions, IMAGES, "channels-last")
def safetensors(m: Any) -> Any:
    pytest.importorskip("safetensors")
    import safetensors.torch

    return tried(lambda: len(safetensors.torch.save(m.state_dict())))


def results_handled(m: Any, x: torch.Tensor) -> Any:
    def stored() -> int:
        file = io.BytesIO()
        torch.save(m(x).detach(), file)
        return file.tell() // 1000

    y = m(x)
    return [
        *(y.is_contiguous(), y.stride(), y._base is None, y.untyped_storage().nbytes(), stored()),
        *tried(lambda: y.view(-1), lambda: m(x).detach_(), lambda: m(x).add_(1), lambda: m(x).resize_(3)),
    ]


@case(lambda: nn.Sequential(nn.Linear(16, 13)), ROWS, "pad-linear")
def results_handled_as_usual(m: Any) -> Any:
    return results_handled(m, X)


@case(lambda: nn.Sequential(nn.Linear(300, 1001)), on_meta(600, 300), "pad-linear")
def large_results_handled_as_usual(m: Any) -> Any:
    return results_handled(m, torch.ones(600, 300))


@case(lambda: nn.Sequential(nn.Conv2d(8, 60, 3)), IMAGES, "pad-channels")
def images_handled(m: Any) -> Any:
    return tried(
        lambda: m(IMAGE).view(-1), lambda: m(IMAGE).detach_(), lambda: m(IMAGE).untyped_storage().nbytes()
    )


def per_sample_gradients(m: Any, x: torch.Tensor) -> Any:
    values = {name: parameter.detach() for name, parameter in m.named_parameters()}

    def loss(values: Any, sample: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(m, values, (sample[None],)).square().sum()

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, x)


@case(lambda: convolutions(norm=False), IMAGES, "channels-last", "pad-channels")
def gradients_of_each_image(m: Any) -> Any:
    return per_sample_gradients(m, IMAGE)


@case(lambda: linear(16, 13, 8), ROWS, "pad-linear")
def gradients_of_each_row(m: Any) -> Any:
    return per_sample_gradients(m, X)


def gradients_in_batches(m: Any, x: torch.Tensor) -> Any:
    """Of the first output alone and of all, as ``jacobian(vectorize=True)`` takes them too."""
    found = []
    for count in (1, 3):
        made = m(x)
        y = made if isinstance(made, torch.Tensor) else torch.cat(made[:count], -1)
        given = torch.stack([torch.ones_like(y), 2 * torch.ones_like(y)])
        learn = list(m.parameters())
        found.append(torch.autograd.grad(y, learn, given, is_grads_batched=True, allow_unused=True))
    return found


CASES += [
    Case(f"gradients_in_batches_{fix}", make, inputs, fix, lambda m, x=x: gradients_in_batches(m, x))
    for make, inputs, fix, x in (
        (lambda: linear(16, 13, 8), ROWS, "pad-linear", X),
        (lambda: convolutions(norm=False), IMAGES, "pad-channels", IMAGE),
    )
]


class TwoImages(nn.Module):
    """A convolution reads what another has padded; a third, or the same, what is given."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.c = self.b if again else nn.Conv2d(6, 8, 3, padding=1)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self.b(F.relu(self.a(x))) + self.c(z)


@case(lambda: TwoImages(False), (IMAGES, on_meta(4096, 6, 16, 16)), "pad-channels")
@case(lambda: TwoImages(True), (IMAGES, on_meta(4096, 6, 16, 16)), "pad-channels")
def images_of_wrong_sizes_beside_padded_ones(m: Any) -> Any:
    return tried(*(lambda n=n: m(IMAGE, torch.ones(2, n, 6, 6)) for n in (6, 8, 16, 32, 64)))


class TwoRows(nn.Module):
    """The same with layers of features."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 13), nn.Linear(13, 16)
        self.c = self.b if again else nn.Linear(13, 16)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self.b(F.relu(self.a(x))) + self.c(z)


@case(lambda: TwoRows(False), (ROWS, on_meta(8, 13)), "pad-linear")
@case(lambda: TwoRows(True), (ROWS, on_meta(8, 13)), "pad-linear")
def rows_of_wrong_sizes_beside_padded_ones(m: Any) -> Any:
    return tried(*(lambda n=n: m(X, torch.ones(8, n)) for n in (13, 16, 32, 64)))


def weights_written_to_before_the_gradient(m: Any, x: torch.Tensor) -> Any:
    """Which is an error where the input has a gradient, and none where it has not."""

    def run(x: torch.Tensor) -> Any:
        m.zero_grad()
        y = m(x)
        with torch.no_grad():
            torch._foreach_mul_(list(m.parameters()), 1.5)
        sum(each.square().sum() for each in (y if isinstance(y, tuple) else (y,))).backward()
        return gradients(m)

    return tried(lambda: run(x), lambda: run(x.clone().requires_grad_()), lambda: m(x))


CASES += [
    Case(f"{weights_written_to_before_the_gradient.__name__}_{fix}", make, inputs, fix, use)
    for make, inputs, fix, x in (
        (lambda: nn.Sequential(nn.Linear(16, 13)), ROWS, "pad-linear", X),
        (lambda: linear(16, 13, 8), ROWS, "pad-linear", X),
        (lambda: convolutions(norm=False), IMAGES, "pad-channels", IMAGE),
    )
    for use in (lambda m, x=x: weights_written_to_before_the_gradient(m, x),)
]


class Doubling(TorchFunctionMode):
    """Puts another function in place of ``F.linear``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return 2 * made if func is F.linear else made


def with_functions_exchanged(m: Any, x: torch.Tensor) -> Any:
    with Doubling():
        y = m(x)
        sum(each.square().sum() for each in (y if isinstance(y, tuple) else (y,))).backward()
    return y, gradients(m)


class CausalByBuffer(Attention):
    """Attention whose mask is a buffer, which the changed model looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(32, 32).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        hidden = self.mask[: x.shape[1], : x.shape[1]] == 0
        weights = (q @ k.transpose(-2, -1)).masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(x.shape)


def traced_by_make_fx(m: Any, x: torch.Tensor) -> Any:
    return [make_fx(m.eval())(x)(x), m(x)]


CASES += [
    Case(f"{use.__name__}_{fix}", make, inputs, fix, lambda m, x=x, use=use: use(m, x))
    for make, inputs, fix, x in (
        (lambda: linear(16, 13, 8), ROWS, "pad-linear", X),
        (CausalByBuffer, on_meta(2, 16, 16), "fuse-attention", TOKENS),
    )
    for use in (with_functions_exchanged, traced_by_make_fx)
]


# ---- weights that are others by now ------------------------------------------------------------


@case(lambda: linear(16, 13, 8), ROWS, "pad-linear")
def a_larger_weight_behind_a_padded_layer(m: Any) -> Any:
    m[2].weight = nn.Parameter(torch.cat((m[2].weight, m[2].weight)))
    m[2].bias = None
    return m(X)


@case(convolutions, IMAGES, "pad-channels")
def more_filters_behind_padded_channels(m: Any) -> Any:
    last = m.eval()[-1]
    last.weight, last.bias = nn.Parameter(torch.cat((last.weight, last.weight))), None
    return m(IMAGE)


@case(lambda: linear(16, 13, 8), ROWS, "pad-linear")
def weights_made_in_inference_mode(m: Any) -> Any:
    with torch.inference_mode():
        return copy.deepcopy(m)(X).clone()


# ---- every case --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_a_changed_model_does_what_the_plain_one_does(case: Case) -> None:
    case.check()


# ---- classes -----------------------------------------------------------------------------------


def test_classes_that_register_their_subclasses() -> None:
    known: dict[str, type] = {}

    class Base(nn.Module):
        def __init_subclass__(cls, *, name: str, **keywords: Any) -> None:
            super().__init_subclass__(**keywords)
            assert name not in known
            known[name] = cls

    class Registered(Base, Attention, name="attention"):
        pass

    model = Registered()
    original = copy.deepcopy(model)
    plan = planned(model, on_meta(2, 8, 16), "fuse-attention")
    assert list(known) == ["attention"]
    assert not difference(original(TOKENS), model(TOKENS))
    assert plan.fixes or plan.refused


def test_a_module_that_makes_another_of_its_class() -> None:
    model = normalized(late=True)
    plan = planned(model, WIDE_ROWS, "compile-parts", min_gain=0.01)
    assert applied(plan) == {"compile-parts"}
    other = model[1].clone()
    assert not difference(WrittenNorm()(torch.ones(2, 64)), other(torch.ones(2, 64)))


def test_replicas_for_other_gpus_run_plain() -> None:
    model = linear(16, 13, 8)
    assert planned(model, ROWS, "pad-linear").fixes
    replica: Any = model[0]._replicate_for_data_parallel()
    replica.weight, replica.bias = 2 * model[0].weight, 3 * model[0].bias
    assert torch.equal(replica(X), F.linear(X, replica.weight, replica.bias))
    tilefit.strip(model)
    assert "_replicate_for_data_parallel" not in vars(model[0])


@pytest.mark.parametrize("fix", ["pad-linear", "channels-last"])
def test_a_shallow_copy_with_other_weights_computes_with_those(fix: str) -> None:
    is_linear = fix == "pad-linear"
    model = linear(16, 13, 8) if is_linear else nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    x = X if is_linear else torch.randn(2, 3, 9, 9)
    assert planned(model, ROWS if is_linear else on_meta(64, 3, 64, 64), fix).fixes
    part: Any = model[0]
    other = copy.copy(part)
    other._parameters = {name: nn.Parameter(2 * p.detach()) for name, p in part.named_parameters()}
    assert type(other) is type(part)
    assert behaviours(part)
    assert not behaviours(other)
    torch.testing.assert_close(other(x), 2 * part(x))


def test_layers_that_are_compiled_one_by_one_share_what_was_compiled() -> None:
    model = nn.Sequential(*(linear(16, 13, 16) for _ in range(10)))
    plan = planned(model, ROWS, "pad-linear")
    assert {fix.name for fix in plan.fixes} == {"pad-linear"}
    assert all(behaviours(layer[0]) for layer in model)
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for layer in model:
        layer.compile(backend=backend)
    given = X.clone().requires_grad_()
    assert model(given).shape == X.shape
    assert len(graphs) == 2  # what PyTorch's own containers call: a layer of either size


def test_torchscript_is_told_to_strip() -> None:
    model = linear(16, 13, 8)
    planned(model, ROWS, "pad-linear")
    with pytest.raises(TilefitError, match=r"tilefit\.strip"):
        torch.jit.script(model)
    torch.jit.script(tilefit.strip(model))


def test_layers_without_a_size_yet() -> None:
    model = nn.Sequential(nn.LazyLinear(13), nn.ReLU(), nn.LazyLinear(8))
    with suppress(TilefitError):  # no other error
        planned(model, ROWS)
    assert model(X).shape == (8, 8)


# ---- optimizers --------------------------------------------------------------------------------


def trained(happening: str, plan: bool, inplace: bool = True) -> Any:
    """Parameters after two scaled steps, the second layer trained alone at first."""
    torch.manual_seed(0)
    model = linear(16, 16, 16)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[2].parameters(), 1e-3)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    if plan:
        made = planned(model, ROWS, "fuse-optimizer", optimizer=optimizer, amp="fp16", inplace=inplace)
        assert made.fixes or made.refused
    scaler = torch.amp.GradScaler("cpu")
    if happening == "a group is added":
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters()})
    elif happening == "a checkpoint is loaded":
        optimizer.load_state_dict(checkpoint)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(X).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return dict(model.named_parameters())


@pytest.mark.parametrize("happening", ["nothing", "a group is added", "a checkpoint is loaded"])
def test_a_fused_optimizer_with_a_scaler(happening: str) -> None:
    expected, found = (outcome(lambda _, p=p: trained(happening, p), nn.Identity()) for p in (False, True))
    assert not (text := difference(expected, found)), text


def test_a_plan_of_a_copy_leaves_the_optimizer_alone() -> None:
    model = linear(16, 16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    planned(model, ROWS, "fuse-optimizer", optimizer=optimizer, inplace=False)
    assert optimizer.state_dict()["param_groups"] == before


# ---- and back ----------------------------------------------------------------------------------


def state(model: nn.Module) -> Any:
    """Everything about a model that a user could see."""
    modules = {name: (type(m), set(vars(m)), set(m._forward_hooks)) for name, m in model.named_modules()}
    strides = {name: (id(p), p.stride()) for name, p in model.named_parameters()}
    return modules, strides


@pytest.mark.parametrize("how", ["undo", "strip", "strip a copy"])
@pytest.mark.parametrize("make", [AutoEncoder, Attention])
def test_fixes_are_taken_off(how: str, make: Callable[[], nn.Module]) -> None:
    model = make()
    before = state(model)
    inputs = ROWS if make is AutoEncoder else on_meta(2, 16, 16)
    plan = planned(model, inputs)
    assert plan.fixes
    if how == "undo":
        plan.undo()
    elif how == "strip":
        assert tilefit.strip(model) is model
    else:
        copied = tilefit.strip(copy.deepcopy(model))
        assert state(copied)[0] == before[0]
        plan.undo()
    assert state(model) == before
