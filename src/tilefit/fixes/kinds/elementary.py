"""Activation functions and root-mean-square normalizations that are written out, in one kernel."""

from __future__ import annotations

import math
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tilefit.capture.copies import copied
from tilefit.capture.run import capture
from tilefit.fixes.changes.assumed import OF_MODULES, is_plain, outside
from tilefit.fixes.changes.behaviour import Behaviour, behaviours, is_replaced
from tilefit.fixes.changes.calls import autocast_dtype, is_followed
from tilefit.fixes.changes.fix import ChangeSet, Context, Found, fix
from tilefit.fixes.proof.verification import ROUNDING, in_double
from tilefit.ops import FORWARD
from tilefit.options import StepOptions
from tilefit.rules.sites import listed

Kernel = Callable[..., torch.Tensor]

#: Host time that this adds to a step for each module, beside launches.
HOST_S = 10e-6

#: The functions of which PyTorch has a kernel that reads and writes once, and computes in fp32 in between.
#: ``softplus`` is linear from 20 on, and the slope of ``hardswish`` is 1 where its input is no number.
FUNCTIONS: dict[str, Kernel] = {
    "gelu": F.gelu,
    "gelu(approximate='tanh')": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
}
_RMS_NORM = "rms_norm"
#: Largest difference, of value and slope, that is rounding.
_TOLERANCES = {torch.float64: ROUNDING, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
#: The largest number that is tried, by element type (of infinity PyTorch's kernels for the CPU alone make
#: something else than its operations, but for fp64).
_LARGEST = {torch.float64: 1e30, torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 6e4}
#: Element types of input, weight and autocast.
_Types = tuple[torch.dtype, torch.dtype | None, torch.dtype | None]


@dataclass(frozen=True)
class Elementary(Behaviour):
    """One of ``FUNCTIONS``, or a normalization, by one kernel.

    Attributes:
        function: Its name in ``FUNCTIONS``, or ``rms_norm``.
        epsilon: Of a normalization: what is added to the mean square.
        results: The element type of the result, for those of input, weight and autocast for which it was
            found to be the same function.
    """

    function: str
    epsilon: float
    results: tuple[tuple[_Types, torch.dtype], ...]
    is_innermost = True

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        weight = module._parameters.get("weight")
        # Of other arguments that it may take nothing is known.
        is_alone = len(args) == 1 and not kwargs
        dtype = self._result_dtype(module, weight, args[0]) if is_alone else None
        if dtype is None:
            return forward(*args, **kwargs)
        input = args[0].to(dtype)
        if weight is None:
            return FUNCTIONS[self.function](input)
        return F.rms_norm(input, weight.shape, weight.to(dtype), self.epsilon)

    def _result_dtype(self, module: nn.Module, weight: Any, x: torch.Tensor) -> torch.dtype | None:
        """In what element type the result is; None where the module is to compute it itself."""
        if type(x) is not torch.Tensor or is_followed() or (x.is_cpu and x.dtype != torch.float64):
            return None
        own = None
        if weight is not None:
            if type(weight) not in (nn.Parameter, torch.Tensor) or weight.device != x.device:
                return None
            own = weight.dtype
        now = x.dtype, own, autocast_dtype(x)
        return next((result for types, result in self.results if types == now), None)


def _attributes(module: nn.Module) -> tuple[tuple[str, Any], ...] | None:
    """A module's attributes, if nobody but the module itself can change what they hold."""
    own = tuple((name, value) for name, value in vars(module).items() if name not in OF_MODULES)
    return own if all(is_plain(value) and not isinstance(value, list) for _, value in own) else None


# ---- which function a module computes ----------------------------------------------------------


def recognised(module: nn.Module, amp: str = "") -> Elementary | None:
    """What computes a module's function by one kernel, if there is such a kernel and no more to the module.

    Args:
        amp: The autocast element type that it will run under, empty for none.
    """
    parts = dict(module.named_parameters()), list(module.buffers()), list(module.children())
    attributes = _attributes(module)
    if parts[1:] != ([], []) or attributes is None or is_replaced(module) or behaviours(module):
        return None
    if parts[0] and (list(parts[0]) != ["weight"] or parts[0]["weight"].dim() != 1):
        return None
    size = len(parts[0]["weight"]) if parts[0] else 0
    key = type(module), type(module).forward, attributes, size, amp
    if key not in _known:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            _known[key] = _found(module, size, attributes, amp) if _is_closed(type(module)) else None
    return _known[key]


_known: dict[Any, Elementary | None] = {}


def _found(module: nn.Module, size: int, attributes: Any, amp: str) -> Elementary | None:
    candidates: dict[tuple[str, float], Kernel] = {
        (name, 0.0): lambda x, w, kernel=kernel: kernel(x) for name, kernel in FUNCTIONS.items() if not size
    }
    for value in {value for _, value in attributes if size and isinstance(value, float) and 0 < value < 0.1}:
        candidates[_RMS_NORM, value] = lambda x, w, epsilon=value: F.rms_norm(x, (size,), w, epsilon)
    mode = module.training
    try:
        for (name, epsilon), kernel in candidates.items():
            agree = [dtype for dtype in _TOLERANCES if _agrees(module, kernel, size, dtype)]
            if {torch.float64, torch.float32} <= set(agree):
                results = tuple(_results(module, size, agree, amp))
                return Elementary(name, epsilon, results)
    except Exception:  # noqa: BLE001 - whatever it does with such an input, it is none of these functions
        return None
    finally:
        module.train(mode)
    return None


def _agrees(module: nn.Module, kernel: Kernel, size: int, dtype: torch.dtype) -> bool:
    """Whether values and gradients do, in one element type (in fp64 with the casts to others left out), in
    training and in evaluation mode."""
    x, weight, aim = _samples(size, dtype)

    def sampled(function: Kernel) -> list[torch.Tensor]:
        tensors = [t.clone().requires_grad_() for t in (x, weight)][: 2 if size else 1]
        with torch.enable_grad():
            y = function(tensors[0], tensors[-1])
            return [y.detach(), *torch.autograd.grad(y, tensors, aim)]

    def own(x: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.func.functional_call(module, {"weight": w} if size else {}, (x,))

    def sampled_in(mode: bool) -> list[torch.Tensor]:
        module.train(mode)
        return sampled(own)

    with in_double() if dtype == torch.float64 else nullcontext():
        expected = sampled(kernel)
        pairs = [pair for mode in (True, False) for pair in zip(sampled_in(mode), expected, strict=True)]
    # Elements of a row cancel, and each is only as exact as the row.
    return all(_is_near(a.double(), b.double(), _TOLERANCES[dtype], rows=bool(size)) for a, b in pairs)


def _is_near(a: torch.Tensor, b: torch.Tensor, limit: float, *, rows: bool) -> bool:
    if rows:
        return bool(((a - b).norm(dim=-1) <= limit * (1 + b.norm(dim=-1))).all())
    return torch.allclose(a, b, rtol=limit, atol=limit, equal_nan=True)


def _samples(size: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Input, weight [size] and gradient of the output: numbers of all magnitudes, or rows [rows, size]."""
    double: dict[str, Any] = {"dtype": torch.float64}
    generator = torch.Generator().manual_seed(0)
    largest = math.log10(_LARGEST[dtype])
    sizes = torch.logspace(-largest, largest, 121, **double)
    special = [0.0, -0.0, math.nan, *([math.inf, -math.inf] if dtype == torch.float64 else [])]
    x = torch.cat([torch.linspace(-30, 30, 601, **double), sizes, -sizes, torch.tensor(special, **double)])
    aim = torch.ones_like(x)
    if size:
        x, aim = torch.randn(2, 10, size, generator=generator, **double)
        x *= torch.cat([torch.logspace(-6, 4, 9, **double), torch.zeros(1, **double)])[:, None]
    weight = torch.rand(size, generator=generator, **double) + 0.5
    return (each.to(dtype) for each in (x, weight, aim))


def _results(
    module: nn.Module, size: int, agree: list[torch.dtype], amp: str
) -> Iterator[tuple[_Types, torch.dtype]]:
    """The element types of the module's results, where one kernel makes them."""
    for cast in dict.fromkeys(("", amp)):
        for x in agree:
            for weight in dict.fromkeys((x, torch.float32) if cast and size else (x,)):
                if cast and x == torch.float64:
                    continue
                seen: list[torch.dtype] = []
                trial = copied(module, "meta").to(weight)
                trial.register_forward_hook(lambda *call: seen.append(call[2].dtype))  # noqa: B023
                inputs = torch.empty(2, size or 2, dtype=x, device="meta")
                options = StepOptions(amp=cast or "off", train=False)  # type: ignore[arg-type]
                capture(trial, inputs, options=options)
                if seen[0] == x or (seen[0] == torch.float32 and x.itemsize == 2):
                    autocast = {"": None, "bf16": torch.bfloat16, "fp16": torch.float16}[cast]
                    yield (x, weight if size else None, autocast), seen[0]


def _is_closed(kind: type[nn.Module]) -> bool:
    """Whether a module's ``forward`` reads nothing that others may change but its attributes, and calls of
    which it is noticed."""
    kinds = types.ModuleType | torch.dtype | property
    read: Any = outside(kind, kind.forward)  # type: ignore[arg-type]
    return all(
        callable(value) or isinstance(value, kinds) or owner in (math, torch) for owner, _, value in read
    )


# ---- the fixes ---------------------------------------------------------------------------------


def _find(context: Context, *, normalizations: bool) -> Iterator[ChangeSet]:
    if context.run.options.compile:  # which makes one kernel of it as well
        return
    names: dict[str, list[str]] = defaultdict(list)
    for entry in context.step.ops:
        if entry.phase == FORWARD:
            names[entry.site.module].append(entry.name)
    modules = dict(context.run.model.named_modules())
    found: dict[Elementary, list[str]] = defaultdict(list)
    for path, kernels in names.items():
        if path in modules and len(set(kernels)) > 1:  # one kernel a call cannot be bettered
            kernel = recognised(modules[path], context.run.options.autocast)
            if kernel is not None and (kernel.function == _RMS_NORM) == normalizations:
                found[kernel].append(path)
    kinds = "normalizations" if normalizations else "activations"
    for kernel, paths in found.items():
        words = f"Compute {listed(paths, kinds)} by one kernel, F.{kernel.function}."
        yield ChangeSet.giving(paths, kernel, words, host_s=HOST_S * len(paths))


@fix("fuse-activations", "PRC004")
def fuse_activations(context: Context) -> Found:
    """Computes activation functions that are written out, such as GPT-2's GELU, by the kernel PyTorch has.

    Written out, a GELU is eight kernels that each read and write the activations, under autocast in fp32
    for the sake of ``pow``; PyTorch's own reads and writes once, and computes in fp32 in between. A module
    without parameters is compared with PyTorch's functions on numbers of all magnitudes, infinity and no
    number among them, in each element type: value and derivative must agree, in fp64 to 1e-12. The result
    has the element type that it had.

    Left alone: a module whose ``forward`` reads a number that others may change, but for its attributes;
    while one of these is another, the module computes its function itself. So it does on the CPU (but for
    fp64), in element types in which it is another function, and under ``torch.compile`` and ``torch.func``.
    """
    yield from _find(context, normalizations=False)


@fix("fuse-normalizations", "PRC004")
def fuse_normalizations(context: Context) -> Found:
    """Computes root-mean-square normalization that is written out by the kernel PyTorch has.

    Written out (``x.float()``, ``pow``, ``mean``, ``rsqrt``, ``mul``, ``mul``) it is six kernels and as many
    in the backward pass; ``F.rms_norm`` reads and writes once. A module with a weight alone is compared with
    it on random numbers in each element type, gradients included, with each number it has as an attribute
    for epsilon; in fp64 they must agree to 1e-12. The result has the element type that it had.

    Left alone is what ``fuse-activations`` leaves alone, and outside autocast a call on an element type other
    than the weight's.
    """
    yield from _find(context, normalizations=True)
