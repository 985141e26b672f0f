"""Root-mean-square normalization in one kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
from tilefit.rules.sites import listed


@dataclass(frozen=True)
class Fused(Behaviour):
    """``F.rms_norm``; not where the element types say that they are to be mixed."""

    epsilon: float
    is_innermost = True

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        mixed = input.dtype != weight.dtype and not torch.is_autocast_enabled(input.device.type)
        if mixed:
            return forward(input)  # type: ignore[no-any-return]
        return F.rms_norm(input, weight.shape, weight, self.epsilon)


@dataclass(frozen=True)
class FusedNormalization(ChangeSet):
    """Modules that compute a root-mean-square normalization, from now on by one kernel.

    Attributes:
        epsilon: What is added to the mean square.
    """

    epsilon: float

    @property
    def summary(self) -> str:
        return f"Compute {listed(self.modules, 'normalizations')} by one kernel, F.rms_norm."

    def make(self, run: Run, edits: Edits) -> None:
        modules = [submodule(run.model, path) for path in self.modules]
        for path, module in zip(self.modules, modules, strict=True):
            if not _is_plain(module):
                raise RefusedError(f"{path} has more to it than a weight")
        for module in modules:
            edits.behave(module, Fused(self.epsilon))


class FuseNormalizations(Fix):
    """Computes root-mean-square normalization that is written out by the kernel PyTorch has.

    Written out (``x.float()``, ``pow``, ``mean``, ``rsqrt``, ``mul``, ``mul``) it is six kernels and as many
    in the backward pass; ``F.rms_norm`` reads and writes once. A module with a weight alone is compared with
    it on random numbers in fp64, gradients included, with each number it has as an attribute for epsilon;
    they must agree to 1e-12.

    Left alone: a call on an element type other than the weight's, outside autocast.
    """

    name = "fuse-normalizations"
    rules = ("PRC004",)

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        if context.run.options.compile:  # which makes one kernel of it as well
            return
        names: dict[str, set[str]] = {}
        for entry in context.step.ops:
            if entry.phase == FORWARD:
                names.setdefault(entry.site.module, set()).add(entry.name)
        modules = dict(context.run.model.named_modules())
        found: dict[float, list[str]] = {}
        for path, kernels in names.items():
            if path in modules and len(kernels) > 1:  # one kernel a call cannot be bettered
                with torch.device("cpu"):  # whatever device new tensors go to by default
                    epsilon = epsilon_of(modules[path])
                if epsilon is not None:
                    found.setdefault(epsilon, []).append(path)
        for epsilon, paths in found.items():
            yield FusedNormalization(tuple(paths), epsilon)


def _is_plain(module: nn.Module) -> bool:
    own = dict(module.named_parameters())
    return (
        list(own) == ["weight"]
        and own["weight"].dim() == 1
        and not list(module.buffers())
        and not list(module.children())
        and "forward" not in vars(module)
    )


def epsilon_of(module: nn.Module) -> float | None:
    """The epsilon with which a module is ``F.rms_norm`` over its weight's size; None if it is not."""
    if not _is_plain(module):
        return None
    epsilons = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.1}
    generator = torch.Generator().manual_seed(0)
    (size,) = module.get_parameter("weight").shape
    weight = torch.rand(size, generator=generator, dtype=torch.float64) + 0.5
    # Rows of all magnitudes, so that epsilon counts in some.
    x = torch.randn(8, size, generator=generator, dtype=torch.float64)
    x *= torch.logspace(-6, 2, 8, dtype=torch.float64)[:, None]

    def sampled(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        tensors = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.enable_grad(), in_double():
            y = function(*tensors)
            return [y.detach(), *torch.autograd.grad((y * torch.cos(y.detach() + 1)).sum(), tensors)]

    try:
        found = sampled(lambda x, w: torch.func.functional_call(module, {"weight": w}, (x,)))
    except Exception:  # noqa: BLE001 - whatever it does with such an input, it is no normalization
        return None
    for epsilon in epsilons:
        expected = sampled(lambda x, w, e=epsilon: F.rms_norm(x, (size,), w, e))  # type: ignore[misc]
        if all(
            torch.allclose(a, b, rtol=ROUNDING, atol=ROUNDING) for a, b in zip(found, expected, strict=True)
        ):
            return epsilon
    return None
