"""One product over all time steps for layers that a Python loop calls step by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

from tilefit.fixes.behaviour import Behaviour
from tilefit.fixes.calls import as_rows, linear_dtype
from tilefit.fixes.fix import ChangeSet, Context, Found, Refusal, RefusedError, fix
from tilefit.fixes.modules import caller, common, require_alone, state_of
from tilefit.fixes.region import Opened, Region
from tilefit.ops import FORWARD
from tilefit.rules.flow import Flow
from tilefit.rules.recurrent.loops import Repeated, repeated_weights

#: Host time that this adds to a step for each call of a layer, beside launches.
HOST_S = 12e-6


@dataclass(frozen=True)
class Stepped(Behaviour):
    """A linear layer that, called with the second step of a sequence, computes the product for the rest.

    Attributes:
        region: Of the module whose loop it is.
    """

    region: Region
    is_innermost = True

    def require(self, module: nn.Module, path: str) -> None:
        require_alone(module, path)

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: torch.Tensor) -> torch.Tensor:
        space = self.region.space()
        dtype = None if space is None else linear_dtype(module, input)
        # What is no view (and the weight's transpose) has no base; one of another kind may hide what it is.
        base = None if dtype is None else input._base
        if space is None or dtype is None or type(base) is not torch.Tensor or not input.numel():
            return forward(input)  # type: ignore[no-any-return]
        state = base._version, base.data_ptr(), torch.is_grad_enabled(), dtype, state_of(module)
        key = id(base), input.shape, input.stride()
        if key not in space:
            space[key] = _Sequence(base, state, int(input.storage_offset()))
            return forward(input)  # type: ignore[no-any-return]
        output = space[key].output(module, input, state)
        return forward(input) if output is None else output  # type: ignore[no-any-return]


class _Sequence:
    """The steps of a sequence that a layer was not called with yet, and what it makes of them.

    Nothing is known of the sequence but where its first two steps are: the others are taken to lie as far
    apart, to the end of the tensor that these are parts of. A step elsewhere is computed by itself.

    Args:
        base: The tensor that the steps are views of; kept, so that its memory is nobody else's.
        state: What the products depend on besides.
        offset: Of the first step.
    """

    def __init__(self, base: torch.Tensor, state: Any, offset: int) -> None:
        self._base, self._state, self._first = base, state, offset
        self._outputs: dict[int, tuple[int, torch.Tensor]] | None = None

    def output(self, layer: nn.Module, x: torch.Tensor, state: Any) -> torch.Tensor | None:
        """What ``layer`` makes of ``x``; None where it is to compute that itself."""
        if state != self._state:  # the loop writes to the sequence as it goes, say
            return None
        if self._outputs is None:
            self._outputs = self._computed(layer, x)
        if (found := self._outputs.pop(int(x.storage_offset()), None)) is None:
            return None
        number, value = found
        if not torch.is_grad_enabled():
            return value
        return _Step.apply(x, self._anchor, self._product, number, [value])  # type: ignore[no-any-return, no-untyped-call]

    def _computed(self, layer: nn.Module, x: torch.Tensor) -> dict[int, tuple[int, torch.Tensor]]:
        """Number and output of the steps from ``x`` on, by their offsets in memory."""
        offset, start = int(x.storage_offset()), int(self._base.storage_offset())
        apart = offset - self._first
        rest = offset - start if apart < 0 else start + _extent(self._base) - _extent(x) - offset
        count = 1 + rest // abs(apart) if apart and rest >= 0 else 0
        if count < 2:
            return {}
        *_, is_graded, dtype, _ = self._state
        weight, bias = layer._parameters["weight"], layer._parameters["bias"]
        assert weight is not None
        offsets = [offset + number * apart for number in range(count)]
        with torch.no_grad():
            steps = x.as_strided((count, *x.shape), (abs(apart), *x.stride()), min(offsets[0], offsets[-1]))
            # Not by autocast, which would keep the cast weight, without a gradient, for others.
            rows = steps.to(dtype, copy=True, memory_format=torch.contiguous_format).flatten(0, 1)
            own = weight.to(dtype)
            values = torch.unsafe_split(F.linear(rows, own, None if bias is None else bias.to(dtype)), len(x))
        if apart < 0:
            offsets.reverse()
        if is_graded:
            self._product = _Product(weight, own, rows.view(count, *x.shape))
            self._anchor = _Parameters.apply(self._product, weight, bias)  # type: ignore[no-untyped-call]
        return {at: (number, value) for number, (at, value) in enumerate(zip(offsets, values, strict=True))}


def _extent(tensor: torch.Tensor) -> int:
    """How many elements of memory a tensor spans."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class _Product:
    """What the gradients of a product over all steps are computed of.

    Attributes:
        weight, cast: The weight, and as it was when it was multiplied.
        rows: All steps.
        gradients: Those of the steps' outputs, with number and input of the step, by backward pass.
    """

    def __init__(self, weight: torch.Tensor, cast: torch.Tensor, rows: torch.Tensor) -> None:
        self.weight, self.cast, self.rows = weight, cast, rows
        self.version = weight._version
        self.gradients: dict[int, list[tuple[int, torch.Tensor, torch.Tensor]]] = defaultdict(list)


class _Parameters(Function):
    """Where the parameters' gradient is computed when those of all steps are there. Its result is nothing but
    what makes autograd wait for them."""

    @staticmethod
    def forward(ctx: Any, product: _Product, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.product = product
        return weight.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        found = ctx.product.gradients.pop(torch._C._current_graph_task_id(), None)
        if not found:
            return None, None, None
        found.sort(key=lambda each: each[0])
        numbers, gradients, inputs = zip(*found, strict=True)
        gradient = as_rows(torch.stack(gradients))
        if torch.is_grad_enabled():
            rows = torch.stack(inputs).to(gradient.dtype)
        else:
            rows = ctx.product.rows
            rows = rows if len(numbers) == len(rows) else rows[list(numbers)]
        _, needs_weight, needs_bias = ctx.needs_input_grad
        by_weight = gradient.mT @ as_rows(rows) if needs_weight else None
        return None, by_weight, gradient.sum(0) if needs_bias else None


class _Step(Function):
    """The output of one step, which was computed with the others'; its gradient with respect to the step."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor, product: _Product, number: int, value: Any
    ) -> torch.Tensor:
        # Not saved for autograd: what is needed in the first place are the rows of the product.
        ctx.x, ctx.version, ctx.product, ctx.number = x, x._version, product, number
        return value[0]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        product, weight = ctx.product, ctx.product.cast
        needs_x, needs_parameters = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():
            if (ctx.version, product.version) != (ctx.x._version, product.weight._version):
                raise RuntimeError("a time step or weight was changed in place before its second derivative")
            weight = product.weight.to(gradient.dtype)
        # Where nobody asks for the parameters' gradients, nobody would take this from here.
        if needs_parameters and torch._C._will_engine_execute_node(ctx.next_functions[1][0]):
            product.gradients[torch._C._current_graph_task_id()].append((ctx.number, gradient, ctx.x))
        return gradient @ weight if needs_x else None, None, None, None, None


def stepping(path: str, loop: str = "", host_s: float = 0.0) -> ChangeSet:
    """The change of a layer that is called step by step.

    Args:
        path: Of the layer.
        loop: Path of the module that all the steps are taken in.
        host_s: Of the change.
    """
    region: Any = Opened(loop)
    words = "Compute {} for all time steps in one product."
    return ChangeSet.giving((path,), Stepped(region), words, host_s=host_s)


@fix("time-steps", "INT005")
def compute_time_steps(context: Context) -> Found:
    """Computes a layer that a Python loop calls with one time step after another for all steps at once.

    The step is a view of the sequence (``x[t]``, ``x[:, t]``, ``x.unbind(1)``), which knows the tensor that
    it is a part of and where in its memory it is: at the second step the layer multiplies all that follow,
    and hands out their results when they are asked for, before the module with the loop returns. The loop is
    not changed. The gradient of the weight is one product, too; that of the sequence goes through each step,
    as it did, for others may watch it.

    The same function: each output is the same sum of products. A step that is a tensor of its own, a
    sequence that is written to in between, ``torch.compile`` and ``torch.func`` get products of their own,
    as before.

    Refused: layers that are no plain ``nn.Linear`` (``nn.LSTMCell`` holds its weights itself).
    """
    if context.run.options.compile:
        return
    for group in repeated_weights(Flow(context.step)):
        path = group.calls[0].layer.module
        if group.sequential:
            continue
        try:
            loop = _loop(context, group)
        except RefusedError as refused:
            yield Refusal((path,), refused.what)
        else:
            yield stepping(path, loop, HOST_S * len(group.calls))


def _loop(context: Context, group: Repeated) -> str:
    """Path of the smallest module in which all the calls are."""
    first, last = group.calls[0].forward, group.calls[-1].forward
    ops = context.step.ops[first : last + 1]
    # What nothing else happens in may be called anew for every step.
    path = ".".join(common(entry.site.module for entry in ops if entry.phase == FORWARD))
    return caller(context.run.model, path) if path else ""
