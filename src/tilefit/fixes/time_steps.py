"""One product over all time steps for layers that a Python loop calls step by step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal, RefusedError
from tilefit.fixes.padding import working_dtype
from tilefit.fixes.run import Run
from tilefit.fixes.swap import require_plain, submodule, swap
from tilefit.rules.flow import Flow
from tilefit.rules.recurrent.loops import repeated_weights
from tilefit.rules.sites import pattern


class SteppedLinear(nn.Linear):
    """A linear layer that, called with one step of a sequence, computes the product for all steps.

    Attributes:
        steps: What it has computed for the steps to come.
    """

    steps: Steps

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return self.steps.output(self, input)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, all time steps at once"


class Steps:
    """Outputs of a layer for the steps of the sequence that its input was taken from."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._state: Any = None
        self._outputs: list[torch.Tensor | None] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"_state": None, "_outputs": []}

    def output(self, layer: SteppedLinear, x: torch.Tensor) -> torch.Tensor:
        """What ``layer`` makes of ``x``."""
        place = None if torch.compiler.is_compiling() or x.is_inference() else _place(x)
        if place is None:
            return F.linear(x, layer.weight, layer.bias)
        base: Any = x._base
        state = (
            *(base, base._version, x.requires_grad, x.shape, x.stride()),
            *(layer.weight._version, torch.is_grad_enabled(), working_dtype(x)),
        )
        if self._state is not None and self._state[0] is base and self._state[1] != state[1]:
            return F.linear(x, layer.weight, layer.bias)  # the loop writes to the sequence as it goes
        if not self._is(state) or self._outputs[place.step] is None:
            sequence = base if x.requires_grad else base.detach()
            self._state, self._outputs = state, list(_products(layer, sequence, place))
        output = self._outputs[place.step]
        self._outputs[place.step] = None
        if all(other is None for other in self._outputs):
            self._forget()
        assert output is not None
        return output

    def _is(self, state: Any) -> bool:
        return self._state is not None and self._state[0] is state[0] and self._state[1:] == state[1:]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a step is in the memory of its sequence.

    Attributes:
        step: Its number.
        sizes: Sizes of the sequence in the order of its memory; one of them is the number of steps.
        order: How to permute those to [steps, sizes of the input].
    """

    step: int
    sizes: tuple[int, ...]
    order: tuple[int, ...]


def _place(x: torch.Tensor) -> _Place | None:
    """Where ``x`` is in the tensor that it is a part of; None if it is not one step of a dense tensor."""
    base = x._base
    if type(base) is not torch.Tensor or not base.is_contiguous() or 0 in (*x.shape, *x.stride()):
        return None
    # From the smallest stride up the sizes of the input fill the memory, but for one: that of the steps.
    axes = sorted((axis for axis in range(x.dim()) if x.shape[axis] > 1), key=lambda axis: x.stride(axis))
    sizes: list[int] = []
    found: list[int] = []
    filled, step_stride = 1, 0
    for axis in axes:
        stride = x.stride(axis)
        if stride != filled:
            if step_stride or stride % filled:
                return None
            step_stride = filled
            sizes.append(stride // filled)
            found.append(-1)
        sizes.append(x.shape[axis])
        found.append(axis)
        filled = stride * x.shape[axis]
    if not step_stride:
        if base.numel() % filled:
            return None
        step_stride = filled
        sizes.append(base.numel() // filled)
        found.append(-1)
        filled = base.numel()
    step, rest = divmod(int(x.storage_offset()) - int(base.storage_offset()), step_stride)
    if rest or filled != base.numel() or not 0 <= step < sizes[found.index(-1)]:
        return None
    ones = [axis for axis in range(x.dim()) if x.shape[axis] == 1]
    memory = [*found[::-1], *ones]
    order = tuple(memory.index(axis) for axis in range(-1, x.dim()))
    return _Place(step, (*sizes[::-1], *(1 for _ in ones)), order)


def _products(layer: SteppedLinear, sequence: torch.Tensor, place: _Place) -> tuple[torch.Tensor, ...]:
    sequence = sequence.view(place.sizes)
    if place.order[-1] == len(place.sizes) - 1:  # in the order of memory nothing is copied
        product = F.linear(sequence, layer.weight, layer.bias).permute(place.order)
    else:
        product = F.linear(sequence.permute(place.order), layer.weight, layer.bias)
    return _Apart.apply(product)  # type: ignore[no-untyped-call, no-any-return]


class _Apart(Function):
    """The steps of a product, as tensors of their own that may be changed in place (one memory, but no views
    of each other to autograd)."""

    @staticmethod
    def forward(product: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(step.data for step in product.unbind())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return torch.stack(gradients)


@dataclass(frozen=True)
class Stepping(ChangeSet):
    """Layers that are called step by step."""

    @property
    def summary(self) -> str:
        return f"Compute {pattern(self.modules)} for all time steps in one product."

    def make(self, run: Run, edits: Edits) -> None:
        modules = [submodule(run.model, path) for path in self.modules]
        for path, module in zip(self.modules, modules, strict=True):
            require_plain(module, path, nn.Linear)
        for module in modules:
            swap(edits, module, SteppedLinear, steps=Steps())


class TimeSteps(Fix):
    """Computes a layer that a Python loop calls with one time step after another for all steps at once.

    The step is a view of the sequence (``x[t]``, ``x[:, t]``, ``x.unbind(1)``), which knows the tensor that
    it is a part of and where in its memory it is: at the first step the layer multiplies all of it, and
    hands out the others' results when they are asked for. The loop is not changed.

    The same function: each output is the same sum of products, and the gradient goes to the same tensor. A
    step that is a tensor of its own, a sequence that is written to in between, and ``torch.compile`` get a
    product of their own, as before.

    Refused: layers that are no plain ``nn.Linear`` (``nn.LSTMCell`` holds its weights itself).
    """

    name = "time-steps"
    rules = ("INT005",)

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        if context.run.options.compile:
            return
        for group in repeated_weights(Flow(context.step)):
            path = group.calls[0].layer.module
            if group.sequential:
                continue
            try:
                require_plain(submodule(context.run.model, path), path, nn.Linear)
            except RefusedError as refused:
                yield Refusal((path,), refused.what)
            else:
                yield Stepping((path,))
