"""What a layer pads is seen by nobody else, whatever is done to the model afterwards."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from fixing import fitted
from tilefit.fixes import Run
from tilefit.fixes.kinds.padding.layers import padded as pad
from tilefit.fixes.kinds.padding.layers import refitted

SIZES = {13: 16, 21: 24}


class Features(nn.Module):
    """Two layers with 13 features or channels between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        layer: Any = nn.Linear if kind == "linear" else lambda a, b: nn.Conv2d(a, b, 3, padding=1)
        self.encoder = nn.Sequential(layer(6, 13), nn.Sigmoid())
        self.decoder = layer(13, 6)
        self.returns_features = False
        self.config = SimpleNamespace(scale=1.0)
        self.sizes = [2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.encoder(x)
        if self.returns_features or self.config.scale != 1.0 or len(self.sizes) != 1:
            return h
        return self.decoder(h)


def padded(model: nn.Module) -> nn.Module:
    """A copy in which 13 features or channels are padded wherever they can be."""
    changed = copy.deepcopy(model)
    made = fitted(changed, SIZES, SIZES)
    made |= {
        path: wide
        for path, layer in changed.named_modules()
        if isinstance(layer, nn.Linear) and (wide := refitted(layer, SIZES, SIZES)) is not None
    }
    pad(made, "").apply(Run(changed))
    return changed


@pytest.fixture(params=["linear", "convolution"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def inputs(kind: str) -> torch.Tensor:
    return torch.randn((5, 6) if kind == "linear" else (2, 6, 4, 4))


def seen(model: Callable[[torch.Tensor], Any], x: torch.Tensor) -> tuple[set[int], set[int]]:
    """Rows of the weights that are multiplied, and features or channels of what the activation is given."""
    rows: set[int] = set()
    features: set[int] = set()

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ in ("linear", "conv2d"):
                rows.add(args[1].shape[0])
            if func.__name__ == "sigmoid":
                features.add(args[0].shape[1])
            return func(*args, **(kwargs or {}))

    with Watching():
        model(x)
    return rows, features


def assert_same(original: nn.Module, changed: nn.Module, x: torch.Tensor) -> None:
    results = []
    for model in (original, changed):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.square().sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.is_contiguous() == theirs.is_contiguous()
            torch.testing.assert_close(ours, theirs)


def test_products_are_padded_and_nothing_else(kind: str) -> None:
    model = Features(kind)
    changed, x = padded(model), inputs(kind)
    assert seen(changed, x) == ({16, 6}, {13})
    assert_same(model, changed, x)
    assert_same(model.eval(), changed.eval(), x)


def test_infinite_inputs_come_out_as_they_did(kind: str) -> None:
    model = Features(kind).double()
    changed, x = padded(model), inputs(kind).double()
    x.view(-1)[0], x.view(-1)[-1] = torch.inf, torch.nan
    expected = model(x)
    assert expected.view(-1)[0].isfinite()  # of a sigmoid
    torch.testing.assert_close(changed(x), expected, equal_nan=True)


@pytest.mark.parametrize("part", ["input", "weight"])
def test_what_is_written_to_before_the_backward_pass_is_an_error(kind: str, part: str) -> None:
    layer: Any = nn.Linear(13, 13) if kind == "linear" else nn.Conv2d(13, 13, 3)
    x = torch.randn((5, 13) if kind == "linear" else (2, 13, 4, 4))
    for model in (layer, padded(layer)):
        leaf = x.clone().requires_grad_(part == "weight")
        y = model(leaf)
        with torch.no_grad():
            (leaf if part == "input" else model.weight).mul_(2)
        with pytest.raises(RuntimeError, match=r"in ?place"):
            y.sum().backward()


def test_what_pytorch_copies_may_be_written_to() -> None:
    layer, x = nn.Linear(13, 13), torch.randn(4, 5, 13).transpose(0, 1)
    found = []
    for model in (layer, padded(layer)):
        given = x.clone()
        y = model(given)
        given.mul_(2)
        found.append(torch.autograd.grad(y.sum(), model.weight))
    torch.testing.assert_close(*found)


def test_an_input_that_nobody_keeps_is_not_kept_either() -> None:
    changed = padded(nn.Linear(13, 13))
    x = torch.randn(5, 13)
    gone = weakref.ref(x)
    y = changed(x)
    del x
    assert gone() is None
    y.sum().backward()


def test_parts_called_by_themselves(kind: str) -> None:
    model = Features(kind)
    changed, x = padded(model), inputs(kind)
    assert_same(model.encoder, changed.encoder, x)
    assert_same(model.encoder[:1], changed.encoder[:1], x)
    assert_same(model.decoder, changed.decoder, model.encoder(x).detach())


@pytest.mark.parametrize("features", [5, 7, 16, 13, 1])
def test_wrong_sizes_raise_what_they_raised(kind: str, features: int) -> None:
    model = Features(kind)
    x = torch.randn((5, features) if kind == "linear" else (2, features, 4, 4))
    for original, changed in ((model, padded(model)), (model.decoder, padded(model).decoder)):
        assert shape_or_error(changed, x) == shape_or_error(original, x)


def shape_or_error(model: nn.Module, x: torch.Tensor) -> str:
    try:
        return str(model(x).shape)
    except RuntimeError as error:
        return str(error)


def _flip_a_flag(model: Any) -> None:
    model.returns_features = True


def _flip_in_a_config(model: Any) -> None:
    model.config.scale = 2.0


def _fill_a_list(model: Any) -> None:
    model.sizes.append(3)


def _replace_an_activation(model: Any) -> None:
    model.encoder[1] = nn.Softmax(1)


def _replace_a_layer(model: Any) -> None:
    torch.manual_seed(1)
    kept = model.decoder
    model.decoder = nn.Linear(13, 4) if isinstance(kept, nn.Linear) else nn.Conv2d(13, 4, 1)


def _add_a_layer(model: Any) -> None:
    model.encoder.append(nn.Softmax(1))


def _watch(model: Any) -> None:
    model.encoder[1].register_forward_hook(lambda module, args, output: output / output.shape[1])


def _watch_backward(model: Any) -> None:
    model.encoder.register_full_backward_hook(lambda module, before, after: (before[0] / after[0].shape[1],))


def _replace_a_forward(model: Any) -> None:
    model.encoder[1].forward = MethodType(lambda self, x: x.softmax(1), model.encoder[1])


def _replace_a_containers_forward(model: Any) -> None:
    model.encoder.forward = lambda x: model.encoder[0](x).softmax(1)


def _freeze_a_part(model: Any) -> None:
    model.encoder.eval().requires_grad_(False)


def _prune(model: Any) -> None:
    prune.ln_structured(model.encoder[0], "weight", 0.5, n=2, dim=0)


def _parametrise(model: Any) -> None:
    torch.manual_seed(2)
    parametrizations.weight_norm(model.encoder[0])


def _count_iterations(model: Any) -> None:
    """In training each look at the weight is one more iteration."""
    torch.manual_seed(2)
    parametrizations.spectral_norm(model.encoder[0])
    parametrizations.spectral_norm(model.decoder)


def _group(model: Any) -> None:
    if isinstance(model.decoder, nn.Conv2d):
        model.decoder.groups, model.decoder.in_channels = 13, 13
        model.decoder.weight = nn.Parameter(torch.ones(13, 1, 3, 3))
        model.decoder.bias = None


def _change_its_class(model: Any) -> None:
    centred = {"_conv_forward": lambda self, x, w, b: nn.Conv2d._conv_forward(self, x, w - w.mean(), b)}
    for layer in (model.encoder[0], model.decoder):
        if isinstance(layer, nn.Conv2d):
            layer.__class__ = type("Centred", (nn.Conv2d,), centred)


def _make_narrower(model: Any) -> None:
    with torch.no_grad():
        for layer, axis in ((model.encoder[0], 0), (model.decoder, 1)):
            layer.weight = nn.Parameter(layer.weight.narrow(axis, 0, 10).clone())
        model.encoder[0].bias = nn.Parameter(model.encoder[0].bias[:10].clone())
    if isinstance(model.decoder, nn.Linear):
        model.encoder[0].out_features = model.decoder.in_features = 10
    else:
        model.encoder[0].out_channels = model.decoder.in_channels = 10


LATER = [
    _flip_a_flag, _flip_in_a_config, _fill_a_list, _replace_an_activation, _replace_a_layer, _add_a_layer,
    _watch, _watch_backward, _replace_a_forward, _replace_a_containers_forward, _freeze_a_part, _prune,
    _parametrise, _count_iterations, _group, _change_its_class, _make_narrower,
]  # fmt: skip


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("copied", [False, True])
def test_what_is_done_to_a_model_afterwards(kind: str, later: Callable[[Any], None], copied: bool) -> None:
    model = Features(kind)
    changed, x = padded(model), inputs(kind)
    if copied:
        changed = copy.deepcopy(changed)
        assert seen(changed, x)[0] == {16, 6}
    for each in (model, changed):
        later(each)
    assert_same(model, changed, x)
    assert_same(model.eval(), changed.eval(), x)


@pytest.mark.parametrize(
    ("owner", "name"), [(F, "linear"), (F, "conv2d"), (nn.Conv2d, "_conv_forward"), (F, "sigmoid")]
)
def test_a_function_that_was_exchanged(
    kind: str, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes the mean of a tensor sees whether it is padded."""
    model = Features(kind)
    changed, x = padded(model), inputs(kind)
    plain = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: plain(*args) + sum(a.mean() for a in args[:2] if _has(a)))
    assert_same(model, changed, x)


def _has(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def test_a_hook_on_every_module(kind: str) -> None:
    seen: list[torch.Size] = []
    changed, x = padded(Features(kind)), inputs(kind)
    handle = register_module_forward_hook(lambda module, args, output: seen.append(output.shape))
    try:
        changed(x)
    finally:
        handle.remove()
    assert {shape[1] for shape in seen} == {13, 6}


def test_copies_files_and_parts_of_them(kind: str) -> None:
    model = Features(kind)
    changed, x = padded(model), inputs(kind)
    for other in (copy.deepcopy(changed), pickle.loads(pickle.dumps(changed))):
        assert seen(other, x)[0] == {16, 6}
        assert_same(model, other, x)
        other.returns_features = True
        assert other(x).shape[1] == 13
    part = copy.deepcopy(changed.encoder)
    assert_same(model.encoder, part, x)
    assert len(pickle.dumps(part)) < 0.8 * len(pickle.dumps(changed))


def test_threads(kind: str) -> None:
    """While one thread is inside a call, others call parts of the model."""
    model = Features(kind)
    changed, x = padded(model), inputs(kind)
    shapes: list[set[Any]] = [set(), set()]

    def run(number: int, part: nn.Module) -> None:
        for _ in range(50):
            shapes[number].add(tuple(part(x).shape))

    threads = [threading.Thread(target=run, args=each) for each in ((0, changed), (1, changed.encoder))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shapes == [{tuple(model(x).shape)}, {tuple(model.encoder(x).shape)}]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(kind: str, reentrant: bool) -> None:
    model = Features(kind)
    changed = padded(model)
    x = inputs(kind).requires_grad_()
    gradients = []
    for each in (model, changed):
        x.grad = None
        checkpoint(each, x, use_reentrant=reentrant).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def test_functional_transforms(kind: str) -> None:
    model = Features(kind)
    changed, x = padded(model), inputs(kind)
    results = []
    for each in (model, changed):
        parameters = {name: p.detach() for name, p in each.named_parameters()}

        def loss(p: Any, sample: torch.Tensor, each: nn.Module = each) -> torch.Tensor:
            return torch.func.functional_call(each, p, (sample[None],)).square().sum()

        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
        _, tangent = torch.func.jvp(lambda p: loss(p, x[0]), (parameters,), (parameters,))
        with torch.autograd.forward_ad.dual_level():
            dual = each(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
            forward = torch.autograd.forward_ad.unpack_dual(dual).tangent
        results.append([*per_sample.values(), tangent, forward])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_second_derivatives(kind: str) -> None:
    changed = padded(Features(kind)).double()
    x = inputs(kind)[:1].double().requires_grad_()
    assert torch.autograd.gradgradcheck(changed, (x,))


def test_traced_and_exported(kind: str) -> None:
    model = Features(kind).eval()
    changed, x = padded(model).eval(), inputs(kind)
    more = torch.cat([x, x, x])
    expected = model(more)
    traced_model = torch.jit.trace(changed, x)
    torch.jit.save(traced_model, io.BytesIO())
    batch = torch.export.Dim("batch", min=2, max=1 << 20)
    exported = torch.export.export(changed, (x,), dynamic_shapes=({0: batch},)).module()
    graph = fx.symbolic_trace(changed)
    compiled = torch.compile(changed, backend="aot_eager", fullgraph=True)
    for each in (traced_model, exported, graph, compiled):
        torch.testing.assert_close(each(more), expected)


def test_under_autocast(kind: str) -> None:
    model = Features(kind)
    changed, x = padded(model), inputs(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [each(x) for each in (model, changed, changed.encoder)]
        with torch.autocast("cpu", enabled=False):
            assert changed(x).dtype == torch.float32
    assert [each.dtype for each in results] == [torch.bfloat16] * 3
    torch.testing.assert_close(results[1], results[0])
