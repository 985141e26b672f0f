"""Padded channels: the same function, the same checkpoints, and faster where it says so."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import tilefit
from fixing import fitted
from in_use import applied, planned
from tilefit.capture.torchvision_import import tolerated
from tilefit.cost import estimate_step
from tilefit.cost.priced import resolve
from tilefit.fixes import ChangeSet, Context, Refusal, RefusedError, Run
from tilefit.fixes.changes.behaviour import behaves, behaviours
from tilefit.fixes.kinds.padding.channels import pad_channels
from tilefit.fixes.kinds.padding.layers import Fitted
from tilefit.fixes.kinds.padding.layers import padded as pad
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
    return pad(fitted(model, sizes, sizes if inputs is None else inputs), sizes)


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


# ---- the same function -------------------------------------------------------------------------


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
    assert tilefit.verify(original, fixed, x).ok


def test_images_without_a_batch() -> None:
    original = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 9, 3))
    assert tilefit.verify(original, padded(original), torch.randn(3, 8, 8)).ok


def test_whoever_watches_a_layer_sees_what_it_always_saw() -> None:
    model = network()
    shapes: list[torch.Size] = []
    model[2].register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    fixed = padded(model)
    copy.deepcopy(fixed)(torch.randn(IMAGES))
    assert shapes[-1][1] == 6
    assert tilefit.verify(model, fixed, torch.randn(IMAGES)).ok


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
    assert [*map(behaviours, fixed.modules())] == [*map(behaviours, padded(original).modules())]
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
    assert plan.speedup > 1.2
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
