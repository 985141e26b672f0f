"""Channels-last: another layout, the same numbers."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import fixing
import tilefit
from tilefit.capture.layouts import is_channels_last
from tilefit.capture.torchvision_import import tolerated
from tilefit.cost import estimate_step
from tilefit.cost.priced import resolve
from tilefit.fixes import ChangeSet, Context, Plan, Refusal, Run
from tilefit.fixes.changes.behaviour import behaves
from tilefit.fixes.kinds.padding.channels_last import run_channels_last
from tilefit.fixes.kinds.padding.layers import InChannelsLast
from tilefit.options import StepOptions

with tolerated():
    import torchvision

IMAGES = (4, 3, 8, 8)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        nn.Conv2d(8, 16, 1),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(16, 8, 2, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def found(model: nn.Module, x: torch.Tensor | None = None, amp: str = "bf16") -> list[ChangeSet | Refusal]:
    (gpu,) = resolve("h200")
    run = Run(model, torch.empty(IMAGES) if x is None else x, StepOptions(amp=amp)).on_meta()
    step = run.capture()
    return list(run_channels_last.find(Context(step, gpu, estimate_step(step, gpu), run)))


def change(model: nn.Module, x: torch.Tensor | None = None) -> ChangeSet:
    (candidate,) = found(model, x)
    assert isinstance(candidate, ChangeSet)
    return candidate


def turned(model: nn.Module, x: torch.Tensor | None = None) -> nn.Module:
    model = copy.deepcopy(model)
    change(model, x).apply(Run(model))
    return model


def planned(name: str, batch: int = 128) -> Plan:
    model = getattr(torchvision.models, name)().to("meta")
    images = torch.empty(batch, 3, 224, 224, device="meta")
    return tilefit.optimize(model, images, gpu="h200", amp="bf16", select=["channels-last"], verify=False)


def test_outputs_and_gradients_are_the_same() -> None:
    original = network()
    assert tilefit.verify(original, turned(original), torch.randn(IMAGES)).ok


def test_under_autocast() -> None:
    original, x = network(), torch.randn(IMAGES)
    result = tilefit.verify(original, turned(original), x, amp="bf16", dtype=torch.float32)
    assert result.ok, result


def test_images_are_converted_once_and_stay_so() -> None:
    fixed = turned(network())
    seen: list[bool] = []
    for layer in list(fixed)[1:7]:
        layer.register_forward_pre_hook(lambda module, args: seen.append(is_channels_last(args[0])))
    fixed(torch.randn(IMAGES))
    assert seen == [True] * 6


def test_parameters_and_gradients_stay_as_they_are() -> None:
    fixed = turned(network())
    fixed(torch.randn(IMAGES)).square().sum().backward()
    for parameter in fixed.parameters():
        assert parameter.is_contiguous()
        assert parameter.grad is not None
        assert parameter.grad.is_contiguous()
    nn.utils.parameters_to_vector(fixed.parameters())
    torch.optim.LBFGS(fixed.parameters()).step(lambda: fixed(torch.randn(IMAGES)).square().mean())


def test_who_calls_sees_the_layout_that_he_gave() -> None:
    original = network()[:4]
    fixed, x = turned(original), torch.randn(IMAGES)
    assert fixed(x).view(-1).shape == original(x).view(-1).shape
    assert fixed[0](x).is_contiguous()
    nhwc = x.to(memory_format=torch.channels_last)
    assert fixed(nhwc).stride() == original(nhwc).stride()


def test_functional_transforms() -> None:
    original, x = network()[:1], torch.randn(3, 3, 8, 8)
    norms = []
    for model in (original, turned(original)):
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(p: dict[str, torch.Tensor], image: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return torch.func.functional_call(model, p, (image[None],)).square().sum()

        norms.append(
            torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)["0.weight"].norm()
        )
    assert torch.allclose(*norms)


def test_training_goes_on_from_a_half_trained_optimizer() -> None:
    x, target = torch.randn(IMAGES), torch.randint(5, (4,))
    original = network()
    fixed = copy.deepcopy(original)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = F.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    first, second = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (original, fixed))
    assert train(original, first) == train(fixed, second)
    change(fixed).apply(Run(fixed))
    for _ in range(4):
        assert train(fixed, second) == pytest.approx(train(original, first), rel=1e-4)
    plain = network()
    plain.load_state_dict(fixed.state_dict())
    third = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    third.load_state_dict(second.state_dict())
    assert train(plain, third) == pytest.approx(train(fixed, second), rel=1e-4)


def test_copies_and_files() -> None:
    fixed = turned(network()).eval()
    file = io.BytesIO()
    torch.save(fixed, file)
    file.seek(0)
    x = torch.randn(IMAGES)
    for other in (copy.deepcopy(fixed), torch.load(file, weights_only=False)):
        assert behaves(other[0], InChannelsLast)
        assert torch.equal(other(x), fixed(x))


def test_one_graph_for_the_compiler() -> None:
    original, x = network(), torch.randn(IMAGES)
    fixed = turned(original)
    y = torch.compile(fixed, backend="aot_eager", fullgraph=True)(x)
    assert torch.allclose(y, original(x), atol=1e-5)


def test_undo_restores_every_module() -> None:
    model = network()
    before = [dict(vars(module)) for module in model.modules()]
    change(model).apply(Run(model)).undo()
    assert [dict(vars(module)) for module in model.modules()] == before


def test_a_layout_that_is_lost_is_made_again() -> None:
    """What an image goes through in between may leave it in NCHW."""

    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            shuffled = x.unflatten(1, (2, 4)).transpose(1, 2).contiguous().flatten(1, 2)
            return self.second(shuffled)

    original = Shuffled()
    assert tilefit.verify(original, turned(original), torch.randn(IMAGES)).ok


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_convolution_that_is_checkpointed_within_a_call(reentrant: bool) -> None:
    class Checkpointing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.second, self.first(x).contiguous(), use_reentrant=reentrant)

    original, seen = Checkpointing(), []
    fixed = turned(original)
    fixed.second.register_forward_hook(lambda module, args, y: seen.append(y.is_contiguous()))
    gradients = []
    for model in (original, fixed):
        model(torch.ones(IMAGES)).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*gradients)
    # Computed again it is plain: it is so the first time, where what it saves is compared.
    assert seen[0] is not reentrant


@pytest.mark.parametrize("channels", [1, 3])
def test_volumes_and_images_of_one_channel(channels: int) -> None:
    for dims, conv in ((2, nn.Conv2d), (3, nn.Conv3d)):
        original = nn.Sequential(conv(channels, 8, 3), nn.ReLU(), conv(8, 8, 3))
        x = torch.randn(2, channels, *[7] * dims)
        fixed = turned(original, x)
        assert fixed(x).is_contiguous()
        assert tilefit.verify(original, fixed, x).ok


def test_a_view_that_needs_nchw_is_refused_with_the_reason() -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.conv(x).view(x.shape[0], -1))

    plan = fixing.fixed(Viewing(), torch.empty(IMAGES), select=["channels-last"])
    (refusal,) = plan.refused
    assert refusal.modules == ("conv",)
    assert "view size is not compatible" in refusal.reason


def test_filters_that_are_not_the_modules_own() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 3, 3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.conv2d(x, self.weight)

    computed = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 8, 3)))
    for model, reason in (
        (Functional(), "computes one with filters it holds"),
        (computed, "parametrisations"),
    ):
        (refusal,) = found(model)
        assert isinstance(refusal, Refusal)
        assert reason in refusal.reason


def test_a_subclass_is_laid_out_too() -> None:
    class Same(nn.Conv2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(F.pad(input, (1, 1, 1, 1)))

    original = nn.Sequential(Same(3, 8, 3), nn.Conv2d(8, 8, 3))
    fixed = turned(original)
    assert is_channels_last(fixed[0](torch.randn(IMAGES))) is False
    assert type(fixed[0]) is Same
    assert tilefit.verify(original, fixed, torch.randn(IMAGES)).ok


def test_nothing_to_do_in_full_precision_or_in_nhwc_already() -> None:
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert found(network(), amp="") == []
    images = torch.empty(IMAGES).to(memory_format=torch.channels_last)
    assert found(network().to(memory_format=torch.channels_last), images) == []


def test_what_is_laid_out_is_not_found_again() -> None:
    class Excited(nn.Module):
        """A gate made of means, which are images of one pixel: they lie in both layouts."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.gate = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return x * self.gate(x.mean((2, 3), keepdim=True))

    model = Excited()
    assert found(model)
    assert not found(turned(model))


def test_resnet_gains_what_it_should() -> None:
    plan = planned("resnet50")
    fix = plan.fixes[-1]
    assert fix.summary == "Run 53 convolutions on images in NHWC."
    assert plan.speedup > 1.6


def test_a_healthy_resnet_is_left_alone() -> None:
    model = torchvision.models.resnet50().to("meta", memory_format=torch.channels_last)
    images = torch.empty(128, 3, 224, 224, device="meta").to(memory_format=torch.channels_last)
    plan = tilefit.optimize(
        model, images, gpu="h200", amp="bf16", select=["channels-last", "pad-channels"], verify=False
    )
    assert plan.fixes == ()
