"""Inputs of detection models: images, and the objects that a training step is to find in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tilefit.capture.inputs import make

#: Images, as in torchvision's own training of these models, for each GPU.
DEFAULT_BATCH = 2
#: Objects in an image: 7.7 in COCO (Lin et al., "Microsoft COCO", 2014, section 5).
OBJECTS = 8


def boxes(device: str) -> torch.Tensor:
    """Boxes of several sizes in an image: left, top, right and bottom, as shares of its sides.

    Returns:
        float32 [``OBJECTS``, 4].
    """
    place = torch.arange(OBJECTS, dtype=torch.float32, device=device) / (2 * OBJECTS)
    return torch.stack([place, place, 2 * place + 0.1, 1.5 * place + 0.2], 1)


def torchvision_inputs(
    model: nn.Module, batch: int, train: bool, device: str
) -> tuple[Sequence[object], ...]:
    """What a detection model of torchvision takes: a list of images and, to train, one of their objects.

    Args:
        model: The model, which resizes every image to a size of its own.
        batch: Images, each square and of that size already.
        train: Say what is in the images.
        device: Where to make them; boxes need values.
    """
    size = image_size(model)
    images = [make((3, size, size), torch.float32, device) for _ in range(batch)]
    return (images, [_objects(model, size, device) for _ in range(batch)]) if train else (images,)


def image_size(model: nn.Module) -> int:
    """The shorter side, in pixels, that a detection model of torchvision resizes an image to."""
    sizes: Sequence[int] = model.transform.min_size  # type: ignore[union-attr, assignment]
    return max(sizes)


def _objects(model: nn.Module, size: int, device: str) -> dict[str, torch.Tensor]:
    objects = {
        "boxes": size * boxes(device),
        "labels": torch.ones(OBJECTS, dtype=torch.int64, device=device),
    }
    heads = getattr(model, "roi_heads", None)
    if getattr(heads, "mask_predictor", None) is not None:
        objects["masks"] = torch.ones((OBJECTS, size, size), dtype=torch.uint8, device=device)
    if (keypoints := getattr(heads, "keypoint_predictor", None)) is not None:
        # The centre of the box, which is seen, for each of them.
        left_top, right_bottom = objects["boxes"].chunk(2, 1)
        points = torch.cat([(left_top + right_bottom) / 2, torch.ones_like(left_top[:, :1])], 1)
        objects["keypoints"] = points[:, None].repeat(1, keypoints.kps_score_lowres.out_channels, 1)
    return objects


def transformers_labels(batch: int, device: str) -> list[dict[str, torch.Tensor]]:
    """What a detection model of transformers is to find in each image: classes and boxes.

    A box is its centre, its width and its height, as shares of the image's sides.
    """
    left_top, right_bottom = boxes(device).chunk(2, 1)
    found = torch.cat([(left_top + right_bottom) / 2, right_bottom - left_top], 1)
    labels = torch.zeros(OBJECTS, dtype=torch.int64, device=device)
    return [{"class_labels": labels, "boxes": found} for _ in range(batch)]
