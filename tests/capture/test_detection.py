"""Detection models: a list of images in, and as many boxes as there happen to be out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from capturing import entries
from tilefit.capture import capture
from tilefit.capture.child import capture_target
from tilefit.capture.detection import OBJECTS
from tilefit.capture.targets import load
from tilefit.errors import CaptureError, UsageError
from tilefit.ops import OPTIMIZER, Conv
from tilefit.options import TargetOptions


def _loaded(name: str, **options: Any) -> Any:
    return load(f"torchvision:{name}", TargetOptions(on_cpu=True, **options))


def test_on_shapes_alone_it_is_told_what_to_do() -> None:
    with pytest.raises(CaptureError, match="depends on the boxes") as caught:
        load("torchvision:fasterrcnn_resnet50_fpn", TargetOptions())
    assert "--on-cpu" in caught.value.hint


def test_a_list_is_no_input_that_can_be_written_out() -> None:
    with pytest.raises(UsageError, match="takes a list of images") as caught:
        _loaded("ssdlite320_mobilenet_v3_large", input=["float32[2,3,320,320]"])
    assert "file.py:factory" in caught.value.hint


def test_a_training_step_is_captured_with_its_losses() -> None:
    options = TargetOptions(on_cpu=True, batch=3, optimizer="sgd")
    step = capture_target("torchvision:ssdlite320_mobilenet_v3_large", options)
    assert (step.batch, step.inputs[0]) == (3, "0: 3 x float32[3,320,320]")
    assert entries(step, Conv)[0].inputs[0].shape == (3, 3, 320, 320)
    assert {entry.phase for entry in entries(step, Conv)} == {"forward", "backward-data", "backward-weight"}
    assert any(entry.phase == OPTIMIZER for entry in step.ops)
    assert any("trained model finds another number of boxes" in note for note in step.notes)
    assert not any("No loss was given" in note for note in step.notes)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("retinanet_resnet50_fpn", {}),
        ("maskrcnn_resnet50_fpn", {"masks": (OBJECTS, 800, 800)}),
        ("keypointrcnn_resnet50_fpn", {"keypoints": (OBJECTS, 17, 3)}),
    ],
)
def test_a_model_is_told_of_the_objects_what_it_learns(name: str, more: dict[str, tuple[int, ...]]) -> None:
    images, targets = _loaded(name, batch=1).inputs
    assert [tuple(image.shape) for image in images] == [(3, 800, 800)]
    shapes = {key: tuple(value.shape) for key, value in targets[0].items()}
    assert shapes == {"boxes": (OBJECTS, 4), "labels": (OBJECTS,), **more}
    left, top, right, bottom = targets[0]["boxes"].unbind(1)
    assert (left < right).all()
    assert (top < bottom).all()
    assert (targets[0]["boxes"] <= 800).all()
    assert len(_loaded(name, batch=1, train=False).inputs) == 1


def test_a_user_s_detector_may_take_a_list_of_images() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Conv2d(3, 4, 3)

        def forward(self, images: list[torch.Tensor]) -> dict[str, torch.Tensor]:
            out = self.head(torch.stack(images))
            return {"boxes": out[:, 0].mean(), "classes": out[:, 1].mean()}

    images = [torch.zeros(3, 32, 32) for _ in range(5)]
    step = capture(Detector(), (images,))
    assert (step.batch, step.inputs) == (5, ("0: 5 x float32[3,32,32]",))
    assert step.notes == ()  # losses that are numbers are added up, nothing stands for them


def test_an_empty_list_holds_no_images() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 4)

        def forward(self, cache: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.cat([*cache, x]))

    assert capture(Cached(), ([], torch.zeros(7, 2))).batch == 7


def test_objects_are_matched_where_values_are_known() -> None:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    inputs = {
        device: load(
            "hf:detr", TargetOptions(batch=2, image_size=64, on_cpu=device == "cpu", arguments=sizes)
        ).inputs
        for device in ("meta", "cpu")
    }
    assert "labels" not in inputs["meta"]
    (first, _) = inputs["cpu"]["labels"]
    assert (first["boxes"].shape, first["class_labels"].shape) == ((OBJECTS, 4), (OBJECTS,))
    assert (first["boxes"] > 0).all()
    assert (first["boxes"] < 1).all()


def test_a_detector_of_transformers_takes_images_alone() -> None:
    inputs = load("hf:detr", TargetOptions(batch=2, image_size=64, train=False)).inputs
    assert [*inputs] == ["pixel_values"]


def test_images_are_compared_with_texts() -> None:
    inputs = load("hf:clip", TargetOptions(batch=2)).inputs
    assert inputs["pixel_values"].shape == (2, 3, 224, 224)
    assert inputs["input_ids"].shape == (2, 77)
    assert inputs["return_loss"] is True
