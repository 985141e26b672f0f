"""A model's forward pass: how it is called with its inputs, and the loss of its output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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

    It is ``loss_of`` of the output; or its ``loss``; or, where it is nothing but numbers, their sum; or the
    one number in it that is made of all the rest; or its mean.

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
    numbers = [leaf for leaf in leaves if leaf.dim() == 0]
    if len(numbers) == len(leaves):
        return reduce(torch.add, leaves), ""
    if len(numbers) == 1 and _is_made_of(numbers[0], [leaf for leaf in leaves if leaf is not numbers[0]]):
        return numbers[0], ""
    means = [leaf.mean() for leaf in leaves]
    loss = torch.stack([m.float() for m in means]).sum() if len(means) > 1 else means[0]
    return loss, "No loss was given: the mean of the model's output stands for it."


def _is_made_of(number: torch.Tensor, others: list[torch.Tensor]) -> bool:
    """Whether a backward pass from a number goes through all the others: not so from a part of a loss."""
    reached = _reached([number])
    return all(other.grad_fn in reached for other in others)


def _reached(results: Iterable[torch.Tensor]) -> set[Any]:
    """The nodes that a backward pass from some tensors goes through."""
    seen: set[Any] = set()
    todo: list[Any] = [result.grad_fn for result in results]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
    return seen


def without_gradient(output: Any, loss: torch.Tensor) -> set[torch.Tensor]:
    """Leaves that something in a model's output is made of, and the loss is not: those of a head that is left
    out. Their gradients are None."""
    nodes = _reached(leaf for leaf in tensors(output) if leaf.requires_grad) - _reached([loss])
    return {node.variable for node in nodes if hasattr(node, "variable")}
