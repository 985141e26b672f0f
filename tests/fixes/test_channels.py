"""Padded channels: the same function, the same checkpoints, and faster where it says so."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import tilefit
from in_use import applied, planned
from tilefit.capture.torchvision_import import tolerated
from tilefit.cost import estimate_step
from tilefit.cost.priced import resolve
from tilefit.fixes import ChangeSet, Context, Refusal, RefusedError, Run
from tilefit.fixes.changes.behaviour import behaves
from tilefit.fixes.kinds.padding.channels import pad_channels
from tilefit.fixes.kinds.padding.layers import Cropped, Fitted
from tilefit.fixes.kinds.padding.layers import padded as pad
from tilefit.fixes.kinds.padding.paths import paddings, traces
from tilefit.options import StepOptions

with tolerated():
    import torchvision

SIZES = {6: 8, 9: 16, 12: 16}


def padded(
    model: nn.Module, sizes: Mapping[int, int] = SIZES, inputs: Mapping[int, int] | None = None
) -> nn.Module:
    """A copy with these numbers of channels padded wherever they can be."""
    run = Run(copy.deepcopy(model))
    change(run.model, sizes, inputs).apply(run)
    return run.model


def change(
    model: nn.Module, sizes: Mapping[int, int] = SIZES, inputs: Mapping[int, int] | None = None
) -> ChangeSet:
    found = paddings(model, traces(Run(model)), sizes, sizes if inputs is None else inputs)
    return pad(found, sizes)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 9, 3, padding=1, bias=False),
        nn.BatchNorm2d(9),
        nn.SiLU(),
        nn.Conv2d(9, 9, 3, padding=1, groups=9),
        nn.MaxPool2d(2),
        nn.Conv2d(9, 12, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 5),
    )


IMAGES = (4, 3, 10, 10)


def channels_seen(model: nn.Module, x: torch.Tensor) -> dict[str, int]:
    """Channels of what each module is given; a hook on them would keep images from being handed on padded."""
    model = copy.deepcopy(model).eval()
    seen: dict[str, int] = {}
    names = {module: name for name, module in model.named_modules()}
    call = nn.Module.__call__

    def watched(module: nn.Module, *args: object, **kwargs: object) -> object:
        if module in names:
            seen[names[module]] = args[0].shape[1]  # type: ignore[attr-defined]
        return call(module, *args, **kwargs)

    with patch.object(nn.Module, "__call__", watched):
        model(x)
    return seen


# ---- the same function -------------------------------------------------------------------------


def test_channels_stay_padded_up_to_the_classifier() -> None:
    seen = channels_seen(padded(network()), torch.randn(IMAGES))
    assert [seen[str(i)] for i in range(12)] == [3, 8, 8, 8, 16, 16, 9, 9, 9, 16, 12, 12]


def test_outputs_gradients_and_statistics_are_the_same() -> None:
    original = network()
    assert tilefit.verify(original, padded(original), torch.randn(IMAGES)).ok


def test_a_wrong_channel_is_caught() -> None:
    original, wrong = network(), padded(network())
    wrong.load_state_dict(original.state_dict())
    wrong[4].running_mean[8] += 1e-3
    assert not tilefit.verify(original, wrong, torch.randn(IMAGES)).ok


def test_under_autocast() -> None:
    original = network()
    result = tilefit.verify(original, padded(original), torch.randn(IMAGES), amp="bf16", dtype=torch.float32)
    assert result.ok, result


def test_parameters_and_buffers_are_untouched() -> None:
    original = network()
    fixed = padded(original)
    fixed(torch.randn(IMAGES)).sum().backward()
    for name, tensor in original.state_dict().items():
        assert fixed.state_dict()[name].shape == tensor.shape
    assert all(p.grad is not None and p.grad.shape == p.shape for p in fixed.parameters())


def test_gradients_of_second_order() -> None:
    fixed = padded(network()[:5].eval().double())
    x = torch.randn(1, 3, 3, 3, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradgradcheck(fixed, (x,))


def test_unpadded_images_are_welcome_in_between() -> None:
    """A part that is called by itself gets images as they always were."""
    original = network().eval()
    fixed = padded(original)
    x = torch.randn(2, 6, 8, 8)
    assert torch.allclose(fixed[3:](x), original[3:](x), atol=1e-6)


class Blocks(nn.Module):
    """What convolutional networks do with images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.left = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.squeeze = nn.Conv2d(6, 9, 1)
        self.excite = nn.Conv2d(9, 6, 1)
        self.down = nn.Conv2d(6, 12, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2)
        self.side, self.norm = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)
        self.relu = nn.ReLU()
        self.out = nn.Conv2d(12, 9, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 3, height, width] to [batch, 9, height, width]."""
        x = self.relu(self.stem(x))
        x = self.relu(x + self.left(x))
        gate = self.excite(self.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))).sigmoid()
        x = x * gate
        small = self.down(x)
        large = F.interpolate(self.up(small), size=x.shape[-2:])
        x = x + large
        return self.out(torch.cat([self.side(x), self.norm(x)], 1))


def test_residuals_gates_resizing_and_concatenations() -> None:
    original = Blocks()
    fixed = padded(original)
    seen = channels_seen(fixed, torch.randn(IMAGES))
    assert {
        name: seen[name] for name in ("left.0", "squeeze", "excite", "down", "up", "side", "norm", "out")
    } == {
        "left.0": 8,
        "squeeze": 8,
        "excite": 16,
        "down": 8,
        "up": 16,
        "side": 8,
        "norm": 8,
        "out": 12,  # what is concatenated is cropped
    }
    assert tilefit.verify(original, fixed, torch.randn(2, 3, 8, 8)).ok


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("resnet18", {"num_classes": 10}, {64: 72, 128: 136}),
        ("DenseNet", {"growth_rate": 6, "block_config": (2, 2)}, {6: 8, 24: 32, 64: 72, 76: 80}),
        ("mobilenet_v3_small", {"width_mult": 0.3}, {8: 12, 16: 24, 32: 40, 24: 32}),
        ("shufflenet_v2_x0_5", {}, {24: 32, 48: 56}),
        ("squeezenet1_1", {"num_classes": 7}, {16: 24, 64: 72, 7: 8}),
    ],
)  # fmt: skip
def test_real_architectures(name: str, options: dict[str, object], sizes: dict[int, int]) -> None:
    original = getattr(torchvision.models, name)(**options)
    fixed = padded(original, sizes)
    assert any(behaves(m, Fitted) for m in fixed.modules())
    x = torch.randn(2, 3, 64, 64)
    result = tilefit.verify(original, fixed, x, steps=0, same_random_numbers=False)
    assert result.ok, result


@pytest.mark.parametrize("dims", [1, 3])
def test_other_numbers_of_dimensions(dims: int) -> None:
    conv = {1: nn.Conv1d, 3: nn.Conv3d}[dims]
    norm = {1: nn.BatchNorm1d, 3: nn.BatchNorm3d}[dims]
    original = nn.Sequential(conv(3, 6, 3), norm(6), nn.ReLU(), conv(6, 9, 1))
    fixed = padded(original)
    x = torch.randn(2, 3, *[5] * dims)
    assert channels_seen(fixed, x)["3"] == 8
    assert tilefit.verify(original, fixed, x).ok


def test_images_without_a_batch() -> None:
    original = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 9, 3))
    assert tilefit.verify(original, padded(original), torch.randn(3, 8, 8)).ok


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(6, affine=False),
        nn.BatchNorm2d(6, track_running_stats=False),
        nn.BatchNorm2d(6, affine=False, track_running_stats=False),
        nn.BatchNorm2d(6, momentum=None),
    ],
)
def test_every_kind_of_batch_normalisation(norm: nn.Module) -> None:
    original = nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.Conv2d(6, 9, 3))
    fixed = padded(original)
    assert channels_seen(fixed, torch.randn(IMAGES))["2"] == 8
    assert tilefit.verify(original, fixed, torch.randn(IMAGES)).ok


# ---- what reads an image otherwise gets it cropped ---------------------------------------------


class Reading(nn.Module):
    """Two convolutions, and between them something that may see how many channels there are."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], channels: int = 6) -> None:
        super().__init__()
        self.first, self.relu = nn.Conv2d(3, 6, 3), nn.ReLU()
        self.second = nn.Conv2d(channels, 9, 1)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.relu(self.first(x))))


@pytest.mark.parametrize(
    ("between", "channels"),
    [
        (lambda x: x / x.shape[1], 6),
        (lambda x: x * x.size(1) ** -0.5, 6),
        (lambda x: x / x.shape[-3:].numel(), 6),
        (lambda x: x * x.mean(1, keepdim=True), 6),
        (lambda x: x.softmax(1), 6),
        (lambda x: x.flip(1), 6),
        (lambda x: torch.cat(x.chunk(2, 1)[::-1], 1), 6),
        (lambda x: x[:, :3], 3),
        (lambda x: x + torch.linspace(0, 1, 6, dtype=x.dtype).view(6, 1, 1), 6),
        (lambda x: F.layer_norm(x, x.shape[1:]), 6),
        (lambda x: F.dropout(x, 0.0), 6),
    ],
)
def test_what_looks_at_the_channels(between: Callable[[torch.Tensor], torch.Tensor], channels: int) -> None:
    original = Reading(between, channels)
    fixed = padded(original)
    x = torch.randn(IMAGES)
    assert channels_seen(fixed, x)["second"] == channels
    assert tilefit.verify(original, fixed, x).ok


@pytest.mark.parametrize(
    "between",
    [
        lambda x: F.interpolate(x, size=(2 * x.shape[2], 3 * x.size(-1))),
        lambda x: x.mean((2, 3), keepdim=True) + x.new_zeros(()) if False else x.mean((-1, -2), keepdim=True),
        lambda x: 3 * x**2 - x / 2,
        lambda x: F.max_pool2d(F.gelu(x.contiguous()), 2),
    ],
)
def test_what_does_not(between: Callable[[torch.Tensor], torch.Tensor]) -> None:
    original = Reading(between)
    fixed = padded(original)
    assert channels_seen(fixed, torch.randn(IMAGES))["second"] == 8
    assert tilefit.verify(original, fixed, torch.randn(IMAGES)).ok


@pytest.mark.parametrize(
    ("bounded", "seen"), [(nn.Sigmoid(), 8), (torch.tanh, 8), (nn.ReLU(), 6), (torch.exp, 6)]
)
def test_a_mask_of_one_channel_keeps_one(bounded: Callable[[torch.Tensor], torch.Tensor], seen: int) -> None:
    """One that may be infinite would make no numbers of padding."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.mask, self.out = nn.Conv2d(3, 6, 1), nn.Conv2d(3, 1, 1), nn.Conv2d(6, 9, 1)
            self.bounded = bounded

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.image(x) * self.bounded(self.mask(x)))

    original = Masked()
    fixed = padded(original, {1: 8, 6: 8})
    assert channels_seen(fixed, torch.randn(IMAGES))["out"] == seen
    assert tilefit.verify(original, fixed, torch.randn(IMAGES)).ok


def test_a_branch_on_the_number_of_channels_stops_the_padding() -> None:
    class Branching(Reading):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.second(x if x.shape[1] == 6 else x.flip(1))

    original = Branching(nn.Identity())
    fixed = padded(original)
    assert channels_seen(fixed, torch.randn(IMAGES))["second"] == 6
    assert tilefit.verify(original, fixed, torch.randn(IMAGES)).ok


def test_whoever_watches_a_layer_sees_what_it_always_saw() -> None:
    model = network()
    shapes: list[torch.Size] = []
    model[2].register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    fixed = padded(model)
    copy.deepcopy(fixed)(torch.randn(IMAGES))
    assert shapes[-1][1] == 6
    assert tilefit.verify(model, fixed, torch.randn(IMAGES)).ok


def test_an_argument_with_a_default_may_change_what_is_done() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()[:6]

        def forward(self, x: torch.Tensor, features: bool = False) -> torch.Tensor:
            for number, layer in enumerate(self.body):
                x = layer(x)
                if features and number == 2:
                    return x
            return x

    model = Optional()
    run = Run(model, torch.empty(IMAGES, device="meta"))
    found = paddings(model, traces(run), SIZES, SIZES)
    pad(found, SIZES).apply(run)
    assert any(behaves(m, Fitted) for m in model.modules())
    assert model(torch.randn(IMAGES), features=True).shape[1] == 6


def test_parts_of_what_cannot_be_traced() -> None:
    """A branch on values outside, a residual block inside: that one keeps its padding."""

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = network()[:6], nn.Conv2d(9, 12, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x if x.shape[0] else x.flip(0)))

    model = Outside()
    run = Run(copy.deepcopy(model), torch.empty(IMAGES, device="meta"))
    found = paddings(run.model, traces(run), SIZES, SIZES)
    pad(found, SIZES).apply(run)
    assert channels_seen(run.model, torch.randn(IMAGES))["body.3"] == 8
    assert channels_seen(run.model, torch.randn(IMAGES))["head"] == 9
    assert tilefit.verify(model, run.model, torch.randn(IMAGES)).ok


# ---- a module like any other -------------------------------------------------------------------


def test_training_goes_on_from_a_half_trained_optimizer() -> None:
    x, target = torch.randn(IMAGES), torch.randint(5, (4,))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def half_trained(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer), train(model, optimizer)
        return optimizer

    original = network()
    fixed = copy.deepcopy(original)
    first, second = half_trained(original), half_trained(fixed)
    change(fixed).apply(Run(fixed))
    for _ in range(4):
        assert train(fixed, second) == pytest.approx(train(original, first), rel=1e-4)
    # And the checkpoint opens in code that knows nothing of this.
    plain = network()
    plain.load_state_dict(fixed.state_dict())
    third = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    third.load_state_dict(second.state_dict())
    assert train(plain, third) == pytest.approx(train(fixed, second), rel=1e-4)


def test_copies_and_files() -> None:
    fixed = padded(network()).eval()
    x = torch.randn(IMAGES)
    file = io.BytesIO()
    torch.save(fixed, file)
    file.seek(0)
    for other in (copy.deepcopy(fixed), torch.load(file, weights_only=False)):
        assert behaves(other[0], Fitted)
        assert torch.equal(other(x), fixed(x))


def test_what_crops_may_be_given_anything() -> None:
    original = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(0))
    pooled, relu = padded(original), padded(original[:2])
    assert behaves(pooled[2], Cropped)
    assert behaves(relu[1], Cropped)
    assert relu[1](torch.tensor(-1.0)) == 0
    x = torch.randn(IMAGES)
    for model in (original, pooled):
        model[2].return_indices = True
    torch.testing.assert_close(pooled[:3](x), original[:3](x))


def test_a_network_with_skipped_parts_is_planned() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = (
                nn.Sequential(nn.Conv2d(into, 13, 3, padding=1), nn.ReLU()) for into in (3, 26)
            )
            self.middle = nn.Sequential(nn.Conv2d(13, 13, 3, padding=1), nn.ReLU())

        def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
            x = self.down(x)
            return self.up(torch.cat((self.middle(x), x if more is None else more), 1))

    original = Skipping()
    model = copy.deepcopy(original)
    plan = planned(model, torch.empty(256, 3, 32, 32, device="meta"), "pad-channels", "channels-last")
    assert applied(plan) == {"pad-channels", "channels-last"}
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(model(x), original(x))


def test_one_graph_for_the_compiler() -> None:
    original, x = network(), torch.randn(IMAGES)
    fixed = padded(original)
    compiled = torch.compile(fixed, backend="aot_eager", fullgraph=True)
    compiled(x).square().sum().backward()
    original(x).square().sum().backward()
    for ours, theirs in zip(fixed.parameters(), original.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)
    assert torch.allclose(fixed[1].running_var, original[1].running_var)


def test_the_compiler_multiplies_padded_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    def unanswered(kind: str) -> bool:
        raise AssertionError(kind)

    # PyTorch 2.11 breaks its graph where it is asked in code that it compiles.
    monkeypatch.setattr(torch.amp, "is_autocast_available", unanswered)
    widths: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        made = [node for node in graph.graph.nodes if getattr(node.target, "__name__", "") == "conv2d"]
        widths.extend(node.meta["example_value"].shape[1] for node in made)
        return graph.forward

    for model in (network().eval(), padded(network()).eval()):
        torch.compile(lambda x: model(x), backend=backend, fullgraph=True)(torch.randn(IMAGES))  # noqa: B023
    assert widths == [6, 9, 9, 12, 8, 16, 9, 16]  # by itself a depthwise convolution is not padded


def test_undo_restores_every_module() -> None:
    model = network()
    before = {name: (type(m), dict(vars(m))) for name, m in model.named_modules()}
    edits_first = change(model, {9: 16}).apply(Run(model))
    edits_second = change(model, {9: 16, 6: 8}).apply(Run(model))
    edits_second.undo()
    edits_first.undo()
    assert {name: (type(m), dict(vars(m))) for name, m in model.named_modules()} == before


def test_numbers_can_be_padded_one_after_the_other() -> None:
    original = network()
    fixed = copy.deepcopy(original)
    for sizes in ({9: 16}, {9: 16, 6: 8}, {9: 16, 6: 8, 12: 16}):
        change(fixed, sizes).apply(Run(fixed))
    assert channels_seen(fixed, torch.randn(IMAGES)) == channels_seen(padded(original), torch.randn(IMAGES))
    assert tilefit.verify(original, fixed, torch.randn(IMAGES)).ok


# ---- as a fix ----------------------------------------------------------------------------------


def found(model: nn.Module, *shape: int, channels_last: bool = True) -> list[object]:
    (gpu,) = resolve("h200")
    x = torch.empty(shape, device="meta")
    run = Run(model.to("meta"), (x,), StepOptions(amp="bf16", channels_last=channels_last)).on_meta()
    step = run.capture()
    return list(pad_channels.find(Context(step, gpu, estimate_step(step, gpu), run)))


def odd() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 60), (60, 60), (60, 90), (90, 90)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(90, 10))


def test_odd_channels_are_worth_padding() -> None:
    plan = tilefit.optimize(
        odd().to("meta"),
        torch.empty(8192, 3, 32, 32, device="meta"),
        gpu="h200",
        amp="bf16",
        channels_last=True,
        select=["pad-channels"],
    )
    fix = plan.fixes[0]  # perhaps the first image's three channels, too
    assert "60 to 64" in fix.summary
    assert "90 to 96" in fix.summary
    assert plan.speedup > 1.3
    assert fix.verification is not None
    assert fix.verification.ok


def test_a_healthy_network_has_nothing_to_pad() -> None:
    model = torchvision.models.resnet50()
    assert [c for c in found(model, 64, 3, 224, 224) if isinstance(c, ChangeSet) and len(c.modules) > 1] == []


def test_what_is_padded_is_not_found_again() -> None:
    fixed = odd()
    sizes = {60: 64, 90: 96}
    change(fixed, sizes, sizes).apply(Run(fixed))
    assert [c for c in found(fixed, 64, 3, 64, 64) if 60 in dict(getattr(c, "sizes", ()))] == []


@pytest.mark.parametrize("compiled", [False, True])
def test_a_compiled_model_with_depthwise_convolutions_is_left_alone(compiled: bool) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 36, 3, padding=1),
        nn.Conv2d(36, 110, 1),
        nn.Conv2d(110, 110, 3, padding=1, groups=110),
        nn.Conv2d(110, 36, 1),
    )
    images = torch.empty(64, 3, 224, 224, device="meta")
    plan = planned(
        model.to("meta"), images, gpu="h100", select=["pad-channels"], amp="bf16", compile=compiled
    )
    assert bool(plan.fixes) is not compiled
    assert compiled == any(
        "depthwise convolutions (2) it was measured to lose" in each.reason for each in plan.refused
    )


def test_a_parametrised_convolution_is_refused() -> None:
    model = odd()
    parametrizations.orthogonal(model[3])
    refusals = [c for c in found(model, 64, 3, 64, 64) if isinstance(c, Refusal)]
    assert refusals == [Refusal(("3",), "3 has parametrisations: its weight is computed anew for every call")]


def test_another_class_of_convolution_is_refused() -> None:
    class Scaled(nn.Conv2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = odd()
    model[6] = Scaled(60, 90, 3, padding=1)
    reasons = {c.reason for c in found(model, 64, 3, 64, 64) if isinstance(c, Refusal)}
    assert [reason for reason in reasons if "Scaled, which may do more than" in reason]


def test_a_model_that_is_called_otherwise_is_refused() -> None:
    with pytest.raises(RefusedError, match="no module"):
        change(network()).apply(Run(nn.Sequential(nn.Conv2d(3, 6, 3))))


def test_few_channels_of_a_first_layer() -> None:
    original = network()
    fixed = padded(original, {}, {3: 4})
    assert [name for name, m in fixed.named_modules() if behaves(m, Fitted)] == ["0"]
    assert tilefit.verify(original, fixed, torch.randn(IMAGES)).ok
