"""Activation functions in one kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tilefit.fixes.behaviour import Behaviour
from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal, RefusedError
from tilefit.fixes.run import Run
from tilefit.fixes.swap import submodule
from tilefit.fixes.verification import ROUNDING, in_double
from tilefit.ops import FORWARD
from tilefit.ops.dtypes import HALVES
from tilefit.rules.flow import Flow, is_cast
from tilefit.rules.sites import listed

#: The functions of which PyTorch has a kernel that reads and writes once, and computes in fp32 in between.
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu(approximate='tanh')": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "softplus": F.softplus,
}


@dataclass(frozen=True)
class Fused(Behaviour):
    """One of ``FUNCTIONS``, by one kernel."""

    function: str
    is_innermost = True

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: torch.Tensor) -> torch.Tensor:
        return FUNCTIONS[self.function](input)


@dataclass(frozen=True)
class FusedActivation(ChangeSet):
    """Modules that compute one function, from now on by one kernel.

    Attributes:
        function: Its name in ``FUNCTIONS``.
    """

    function: str

    @property
    def summary(self) -> str:
        return f"Compute {listed(self.modules, 'activations')} by one kernel, F.{self.function}."

    def make(self, run: Run, edits: Edits) -> None:
        modules = [submodule(run.model, path) for path in self.modules]
        for path, module in zip(self.modules, modules, strict=True):
            if function_of(module) != self.function:
                raise RefusedError(f"{path} does not compute {self.function}")
        for module in modules:
            edits.behave(module, Fused(self.function))


class FuseActivations(Fix):
    """Computes activation functions that are written out, such as GPT-2's GELU, by the kernel PyTorch has.

    Written out, a GELU is eight kernels that each read and write the activations, under autocast in fp32
    for the sake of ``pow``; PyTorch's own reads and writes once, and computes in fp32 in between. A module
    without parameters is compared with PyTorch's functions on numbers from -30 to 30, in fp64: value and
    derivative must agree to 1e-12.

    Left alone: a module whose result is wider than its input, unless everything that reads it casts it back.
    """

    name = "fuse-activations"
    rules = ("PRC004",)

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        if context.run.options.compile:  # which makes one kernel of it as well
            return
        flow = Flow(context.step)
        ops: dict[str, list[int]] = {}
        for index, entry in enumerate(context.step.ops):
            if entry.phase == FORWARD:
                ops.setdefault(entry.site.module, []).append(index)
        modules = dict(context.run.model.named_modules())
        found: dict[str, list[str]] = {}
        for path, indices in ops.items():
            # One kernel a call cannot be bettered.
            if path in modules and len({context.step.ops[i].name for i in indices}) > 1:
                function = function_of(modules[path])
                if function and _is_cast_back(flow, indices):
                    found.setdefault(function, []).append(path)
        for function, paths in found.items():
            yield FusedActivation(tuple(paths), function)


def _is_cast_back(flow: Flow, indices: list[int]) -> bool:
    """Whether the result of a module is as wide as its input, or is read by casts to such a type alone."""
    ops = flow.step.ops
    result = ops[indices[-1]].outputs[0]
    if not any(ref.dtype in HALVES for i in indices for ref in ops[i].inputs) or result.dtype in HALVES:
        return True
    readers = [r for i in indices for r in flow.readers[i] if r not in indices and ops[r].phase == FORWARD]
    return all(is_cast(ops[r]) and ops[r].outputs[0].dtype in HALVES for r in readers)


def function_of(module: nn.Module) -> str:
    """The function of ``FUNCTIONS`` that a module computes; empty if none, or if it has more to it."""
    parts = (*module.children(), *module.parameters(), *module.buffers())
    if parts or "forward" in vars(module):
        return ""
    mode = module.training
    try:
        found = _sampled(module.train()), _sampled(module.eval())
    except Exception:  # noqa: BLE001 - whatever it does with such an input, it is no function of numbers
        return ""
    finally:
        module.train(mode)
    for name, function in FUNCTIONS.items():
        expected = _sampled(function)
        if all(torch.allclose(each, expected, rtol=ROUNDING, atol=ROUNDING) for each in found):
            return name
    return ""


def _sampled(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Values and derivatives, [2, numbers]."""
    with torch.enable_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]), in_double():
        numbers = torch.linspace(-30, 30, 601).requires_grad_()
        values = function(numbers)
        (slopes,) = torch.autograd.grad(values.sum(), numbers)
    return torch.stack([values.detach(), slopes])
