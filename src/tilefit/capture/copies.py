"""Copies of a model and its inputs on another device, or in another layout."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tilefit.capture.dtypes import AMP_DTYPES
from tilefit.capture.trees import tensors
from tilefit.errors import CaptureError, UsageError


class _CopyTo(TorchFunctionMode):
    """Deep copies made under this mode have their tensors on another device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and (args[0].device.type != self.device or not args[0].is_leaf):
            # A leaf or not: what weight_norm computed of its parameters, it computes anew when it is called.
            tensor, memo = args
            moved = tensor.detach().to(self.device, copy=True).requires_grad_(tensor.requires_grad)
            memo[id(tensor)] = moved
            return moved
        return func(*args, **(kwargs or {}))


def in_type(model: Any, inputs: Any, weights: str) -> dict[str, Any]:
    """The ``model`` and the ``inputs`` with their floating-point tensors in another element type.

    Raises:
        UsageError: it is no module, whose parameters could be turned into anything.
    """
    if not isinstance(model, nn.Module):
        raise UsageError("a function that does a whole step has no parameters to turn into bf16")
    dtype = AMP_DTYPES[weights]

    def turned(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return {"model": model.to(dtype), "inputs": tree_map(turned, inputs)}


def copied(model: nn.Module, device: str) -> nn.Module:
    """A copy of the model on ``device``; on meta, weights are neither copied nor allocated."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if is_lazy(parameter):
            raise CaptureError(
                "a layer has no size yet (a lazy module)", hint="Call the model once before it is captured."
            )
        if parameter.device.type != device:
            data = _materialised(parameter.detach(), device)
            memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        if buffer.device.type != device:
            memo[id(buffer)] = _materialised(buffer.detach(), device)
    try:
        with _CopyTo(device):
            made = copy.deepcopy(model, memo)
            for old, new in zip(model.modules(), made.modules(), strict=True):
                if isinstance(old, torch.jit.ScriptModule):
                    continue
                if "forward" in vars(old):  # set on the instance, as by model.forward = torch.compile(…)
                    new.forward = _over_copies(old.forward, memo)
            return made
    except Exception as error:
        raise CaptureError(
            f"the model cannot be copied ({type(error).__name__}: {error})",
            hint="Capture works on a copy. Give a factory: file.py:factory.",
        ) from error


def _over_copies(function: Any, memo: dict[int, Any]) -> Any:
    """A function that refers to copies; ``copy.deepcopy`` leaves functions, and what they close over."""
    function = getattr(function, "_torchdynamo_orig_callable", function)
    if not isinstance(function, FunctionType):
        return copy.deepcopy(function, memo)

    def copied_cell(cell: CellType) -> CellType:
        try:
            value = cell.cell_contents
        except ValueError:  # nothing was assigned to the variable
            return cell
        if isinstance(value, FunctionType):
            return CellType(_over_copies(value, memo))
        ours = isinstance(value, nn.Module | torch.Tensor | MethodType)
        return CellType(copy.deepcopy(value, memo)) if ours else cell

    closure = tuple(map(copied_cell, function.__closure__ or ()))
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def on_device(inputs: Any, device: str) -> Any:
    """The inputs on ``device``, as leaves of their own."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):  # its sizes stay on the host
            return leaf._replace(
                data=moved(leaf.data),
                sorted_indices=moved(leaf.sorted_indices),
                unsorted_indices=moved(leaf.unsorted_indices),
            )
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return _materialised(leaf.detach(), device).requires_grad_(leaf.requires_grad)

    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    return tree_map(moved, inputs, is_leaf=lambda each: isinstance(each, PackedSequence))


def _materialised(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """The tensor on ``device``; one without data, asked for on the CPU, gets small random values."""
    if tensor.device.type == "meta" and device != "meta":
        real = torch.empty_like(tensor, device=device)
        if tensor.is_floating_point():
            return real.normal_(std=0.02)
        return real.zero_()
    return tensor.to(device)


def to_channels_last(model: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    """The model and the images among its inputs in NHWC.

    Raises:
        UsageError: there is nothing to convert.
    """
    if all(tensor.dim() != 4 for tensor in (*model.parameters(), *model.buffers(), *tensors(inputs))):
        raise UsageError(
            "--channels-last has no effect: no weight and no input has four dimensions", hint="Leave it out."
        )
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 4:
            return leaf.detach().to(memory_format=torch.channels_last).requires_grad_(leaf.requires_grad)
        return leaf

    return model, tree_map(convert, inputs)
