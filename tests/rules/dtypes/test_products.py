"""PRC001, PRC002, PRC003: the element type of the products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

from builders import StepBuilder
from tilefit.capture import capture
from tilefit.ops import BACKWARD_DATA, FORWARD, OPTIMIZER, Step, Streaming
from tilefit.rules import Change
from tilefit.rules.dtypes.autocast import in_types, under_autocast
from tilefit.rules.engine import changed
from toys import LanguageModel, tokens
from whatif import findings, saved_s


def test_tf32_is_not_proposed_where_it_is_on_missing_or_not_needed() -> None:
    fp32 = capture(LanguageModel(), tokens())
    assert not findings(fp32, "PRC001", gpu="t4", min_gain=0)
    assert not findings(capture(LanguageModel(), tokens(), tf32=True), "PRC001", min_gain=0)
    assert not findings(capture(LanguageModel(), tokens(), amp="bf16"), "PRC001", min_gain=0)


@pytest.mark.parametrize(("gpu", "half"), [("h200", "bf16"), ("t4", "fp16")])
@pytest.mark.parametrize("train", [True, False])
def test_mixed_precision_is_worth_what_a_capture_in_it_saves(gpu: str, half: str, train: bool) -> None:
    fp32 = capture(LanguageModel(), tokens(), train=train)
    in_half = LanguageModel().to({"bf16": torch.bfloat16, "fp16": torch.float16}[half])
    mixed = capture(LanguageModel(), tokens(), amp=half) if train else capture(in_half, tokens(), train=False)
    (finding,) = findings(fp32, "PRC002", gpu=gpu)
    assert finding.gain_s == pytest.approx(saved_s(fp32, mixed, gpu), rel=0.05)
    assert ("GradScaler" in finding.fix) == (half == "fp16" and train)
    assert any("Amdahl" in line for line in finding.arithmetic)


@pytest.mark.parametrize("gpu", ["v100", "t4", "rtx-2080-ti"])
@pytest.mark.parametrize("train", [True, False])
def test_bf16_where_only_fp16_has_tensor_cores_is_worth_what_a_capture_in_fp16_saves(
    gpu: str, train: bool
) -> None:
    bf16 = capture(LanguageModel(), tokens(), train=train, amp="bf16")
    fp16 = capture(LanguageModel(), tokens(), train=train, amp="fp16")
    (finding,) = findings(bf16, "PRC002", gpu=gpu)
    assert finding.gain_s == pytest.approx(saved_s(bf16, fp16, gpu), rel=0.05)
    assert finding.message.startswith("bf16 products run on this GPU's CUDA cores")
    assert "torch.float16" in finding.fix
    assert ("GradScaler" in finding.fix) == train
    assert not findings(fp16, "PRC002", gpu=gpu, min_gain=0)
    assert not findings(bf16, "PRC002", gpu="p100-pcie-16gb", min_gain=0)


def test_mixed_precision_of_a_convolutional_model() -> None:
    def layers(width: int) -> list[nn.Module]:
        return [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]

    model = nn.Sequential(
        nn.Conv2d(3, 64, 1, bias=False), *layers(64), *layers(64), nn.AvgPool2d(2), *layers(64)
    )
    images = torch.empty(64, 3, 112, 112, device="meta")
    fp32 = capture(model, images, channels_last=True)
    mixed = capture(model, images, channels_last=True, amp="bf16")
    (finding,) = findings(fp32, "PRC002")
    assert finding.gain_s == pytest.approx(saved_s(fp32, mixed), rel=0.05)


def test_a_gpu_without_tf32_multiplies_in_fp32() -> None:
    step = capture(LanguageModel(), tokens(), tf32=True)
    (old,) = findings(step, "PRC002", gpu="v100")
    (new,) = findings(step, "PRC002", gpu="a100")
    assert old.message.startswith("products run in fp32; in fp16")
    assert new.message.startswith("products run in tf32; in bf16")


def test_the_type_that_most_is_multiplied_in_is_named() -> None:
    """Convolutions run in TF32 by default, which the first of a vision transformer is alone to do."""
    model = nn.Sequential(nn.Conv2d(3, 768, 32, stride=32), nn.Flatten(2), nn.Linear(49, 4096))
    images = torch.empty(256, 3, 224, 224, device="meta")
    (finding,) = findings(capture(model, images, train=False), "PRC002")
    assert finding.message.startswith("products run in fp32")
    assert finding.fix.startswith("Convert model and inputs once")


def test_a_mixed_or_half_step_is_healthy() -> None:
    assert not findings(capture(LanguageModel(), tokens(), amp="bf16"), "PRC002", min_gain=0)
    assert not findings(capture(LanguageModel().bfloat16(), tokens()), "PRC002", min_gain=0)


def test_a_gpu_without_half_precision_products_gets_no_advice() -> None:
    assert not findings(capture(LanguageModel(), tokens()), "PRC002", gpu="p100-pcie-16gb", min_gain=0)


class Mixing(nn.Module):
    """Normalised products over positions and over channels, on a stream that a convolution begins."""

    def __init__(self, width: int = 256, positions: int = 196) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 16, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.positions = nn.ModuleList(nn.Linear(positions, positions) for _ in range(2))
        self.channels = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images).flatten(2).transpose(1, 2)
        for number in range(2):
            x = x + self.positions[number](self.norms[2 * number](x).transpose(1, 2)).transpose(1, 2)
            x = x + self.channels[number](self.norms[2 * number + 1](x))
        return self.norms[4](x)


class GeluByHand(nn.Module):
    """Half and full precision meet in its sums and products, as in GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        return self.down(0.5 * y * (1.0 + torch.tanh(0.8 * (y + 0.045 * torch.pow(y, 3.0)))))


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        pytest.param(Mixing, (128, 3, 224, 224), id="norms on a half stream"),
        pytest.param(GeluByHand, (8192, 256), id="a gelu by hand"),
        pytest.param(
            lambda: nn.Sequential(
                nn.Conv2d(3, 32, 3, padding=1),
                nn.PReLU(),
                nn.Upsample(scale_factor=2, mode="bilinear"),
                nn.Conv2d(32, 32, 3, padding=1),
                nn.GroupNorm(4, 32),
            ),
            (32, 3, 112, 112),
            id="interpolation",
        ),
    ],
)
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_the_types_of_a_step_under_autocast_are_those_of_a_capture(
    model: Callable[[], nn.Module], shape: tuple[int, ...], half: str
) -> None:
    images = torch.empty(shape, device="meta")
    mixed = capture(model(), images, amp=half)
    step = capture(model(), images)
    predicted = changed(step, Change(under_autocast(step, half)))

    def moved(step: Step) -> int:
        return sum(entry.op.moved_bytes for entry in step.ops if entry.phase != OPTIMIZER)

    assert moved(predicted) == pytest.approx(moved(mixed), rel=0.03)


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_half_and_full_precision_meet_in_the_same_operations_as_in_a_capture(half: str) -> None:
    """What an operation takes depends on its type and on its bytes."""
    rows, width = 8192, 1024
    x = torch.empty(rows, 256, device="meta")
    step, mixed = capture(GeluByHand(), x), capture(GeluByHand(), x, amp=half)

    def met(step: Step, phase: str) -> Counter[tuple[str, str, int]]:
        large = (e for e in step.ops if e.phase == phase and getattr(e.op, "elements", 0) == rows * width)
        names = ("aten.mul", "aten.add", "aten.tanh", "aten.tanh_backward", "aten.pow")
        return Counter((e.name, e.op.dtype, e.op.moved_bytes) for e in large if e.name in names)

    predicted = changed(step, Change(under_autocast(step, half)))
    assert met(predicted, FORWARD) == met(mixed, FORWARD)
    guessed, seen = (
        sum(size for *_, size in met(each, BACKWARD_DATA).elements()) for each in (predicted, mixed)
    )
    assert guessed == pytest.approx(seen, rel=0.05)


@pytest.mark.parametrize("training", [True, False])
def test_operations_of_which_no_tensor_is_known_stay(training: bool) -> None:
    """As of a profiled run, whose trace does not tell them."""
    b = StepBuilder(batch=64, dtype="fp32", training=training)
    b.linear("layer", 4096, 4096, 4096)
    b.add(Streaming("pointwise", 1 << 20, 1 << 22, 1 << 22), "act", name="aten.gelu")
    assert findings(b.step(), "PRC002", min_gain=0)


def test_an_update_in_float64_moves_half_as_much_in_float32() -> None:
    """A multi-tensor operation does not tell its tensors."""
    step = capture(nn.Linear(64, 64).double(), torch.empty(8, 64, dtype=torch.float64), optimizer="adamw")
    update = {index: entry for index, entry in enumerate(step.ops) if entry.phase == OPTIMIZER}
    single = in_types(step, {"fp64": "fp32"})
    told = [(index, entry) for index, entry in update.items() if entry.op.dtype == "fp64"]
    assert told
    for index, entry in told:
        assert single[index][0].op.moved_bytes == pytest.approx(entry.op.moved_bytes / 2, rel=0.1)
