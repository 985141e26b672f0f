"""``torchvision:<name>``: a model of torchvision."""

from __future__ import annotations

import inspect

from torch import nn

from tilefit.capture import detection
from tilefit.capture.failures import ON_CPU
from tilefit.capture.inputs import DEFAULT_IMAGE_SIZE
from tilefit.capture.targets.base import Target, build, library, unknown
from tilefit.capture.targets.images import image_target
from tilefit.errors import CaptureError, UsageError
from tilefit.options import TargetOptions

#: Frames of a clip, and the pixels of those of a 3D ResNet, as in torchvision's own training.
_FRAMES = 16
_RESNET_CLIP_SIZE = 112


def load(name: str, options: TargetOptions) -> Target:
    """A torchvision model, with images or clips."""
    models = library("torchvision").models
    if name not in models.list_models():
        hint = "See torchvision.models.list_models()."
        raise unknown("torchvision has no model", name, models.list_models(), hint)
    weights = dict.fromkeys(
        {"weights", "weights_backbone"} & {*inspect.signature(models.get_model_builder(name)).parameters}
    )
    detects = name in models.list_models(models.detection)
    if detects and options.device == "meta":
        raise CaptureError(
            "what a detection model computes depends on the boxes that it finds, and only shapes are known",
            where=f"torchvision:{name}",
            hint=ON_CPU,
        )
    model = build(lambda: models.get_model(name, **weights, **options.arguments), name, options.device)
    if detects:
        return _detection_target(f"torchvision:{name}", model, options)
    default = 299 if name.startswith("inception") else DEFAULT_IMAGE_SIZE
    frames = _FRAMES if name in models.list_models(models.video) else 0
    if isinstance(model, models.video.VideoResNet):
        default = _RESNET_CLIP_SIZE
    return image_target(f"torchvision:{name}", model, 3, options.image_size or default, options, frames)


def _detection_target(name: str, model: nn.Module, options: TargetOptions) -> Target:
    if options.input:
        raise UsageError(
            "--input has no lists, and a detection model takes a list of images",
            hint="Leave it out, or return (model, ([image, …],)) from a factory: file.py:factory.",
        )
    size = detection.image_size(model)
    options.refuse_sizes(f"the model resizes its images itself, to {size} pixels", ["image_size"])
    options.refuse_sizes("images have no tokens", ["seq"])
    batch = options.batch or detection.DEFAULT_BATCH
    inputs = detection.torchvision_inputs(model, batch, options.train, options.device)
    boxes = "The weights are random: a trained model finds another number of boxes."
    return Target(model, inputs, name, notes=(boxes,))
