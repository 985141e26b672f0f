"""``timm:<name>``: a model of timm."""

from __future__ import annotations

from tilefit.capture.inputs import DEFAULT_IMAGE_SIZE
from tilefit.capture.targets.base import Target, build, library, unknown
from tilefit.capture.targets.images import image_target
from tilefit.options import TargetOptions


def load(name: str, options: TargetOptions) -> Target:
    """A timm model, with images."""
    timm = library("timm")
    if not timm.is_model(name):
        raise unknown("timm has no model", name, timm.list_models(), "See timm.list_models().")
    model = build(lambda: timm.create_model(name, **options.arguments), name, options.device)
    channels, height = getattr(model, "default_cfg", {}).get("input_size", (3, DEFAULT_IMAGE_SIZE))[:2]
    return image_target(f"timm:{name}", model, channels, options.image_size or height, options)
