"""A model's forward pass: how it is called with its inputs, and the loss of its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch

from tilefit.capture.trees import tensors
from tilefit.errors import CaptureError


def call(function: Callable[..., Any], inputs: Any) -> Any:
    """What a function returns for a tensor, a tuple of positional or a mapping of named arguments."""
    if inputs is None:
        return function()
    if isinstance(inputs, Mapping):
        return function(**inputs)
    if isinstance(inputs, (tuple, list)):
        return function(*inputs)
    return function(inputs)


def loss_of_output(
    output: Any, loss_of: Callable[[Any], torch.Tensor] | None = None
) -> tuple[torch.Tensor, str]:
    """The loss to differentiate, and a note.

    It is ``loss_of`` of the output; or its ``loss``; or, where it is nothing but numbers, their sum; or its
    mean.

    Raises:
        CaptureError: nothing in the output has a gradient.
    """
    if loss_of is not None:
        return loss_of(output), ""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss, ""
    leaves = [leaf for leaf in tensors(output) if leaf.is_floating_point() and leaf.requires_grad]
    if not leaves:
        raise CaptureError(
            "the model's output has no floating-point tensor with a gradient: there is nothing to train on",
            hint="Use --infer, or give a factory that returns a training-step callable.",
        )
    if all(leaf.dim() == 0 for leaf in leaves):
        return reduce(torch.add, leaves), ""
    means = [leaf.mean() for leaf in leaves]
    loss = torch.stack([m.float() for m in means]).sum() if len(means) > 1 else means[0]
    return loss, "No loss was given: the mean of the model's output stands for it."
