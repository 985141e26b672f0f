"""Masks of attention, contiguous, so that its fused kernels take them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from tilefit.fixes.attention import put_around
from tilefit.fixes.behaviour import Behaviour, behaves
from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal
from tilefit.fixes.run import Run
from tilefit.ops.entries import MASK
from tilefit.rules.sites import pattern


class WithContiguousMasks(Behaviour):
    """The module, given arguments whose last dimension is contiguous where they look like masks."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return forward(
            *(_contiguous(value) for value in args), **{name: _contiguous(kwargs[name]) for name in kwargs}
        )


def _contiguous(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() < 2 or value.stride(-1) == 1:
        return value
    # Numbers of two or three dimensions may be what attention is computed of, but then repeat no column.
    is_mask = value.dim() == 4 or value.dtype == torch.bool or value.stride(-1) == 0
    return value.contiguous() if is_mask else value


@dataclass(frozen=True)
class ContiguousMasks(ChangeSet):
    """Modules that pass the mask they are given on to attention."""

    #: A fused kernel draws its own random numbers for dropout.
    same_random_numbers: ClassVar[bool] = False

    @property
    def summary(self) -> str:
        where = pattern(self.modules) if any(self.modules) else "the model"
        return f"Make the mask that {where} is given contiguous, so that attention is fused."

    def make(self, run: Run, edits: Edits) -> None:
        put_around(run, edits, self.modules, WithContiguousMasks())


class MakeMasksContiguous(Fix):
    """Makes the mask of attention contiguous where its layout keeps PyTorch from the fused kernels.

    Masks that were expanded or permuted have a last dimension that is not contiguous. Where the module that
    calls ``scaled_dot_product_attention`` is given such a mask, it is called with a copy that is contiguous:
    the same values. Bools, all that has 4 dimensions, and what repeats one column are taken for masks; a mask
    that is contiguous, or none, is passed as it is. The copy is made for each of the modules; the compiler
    makes it once for all.

    The encoders of transformers 5.17 make such a mask only when they are compiled: there the change is worth
    something under ``torch.compile`` alone. A mask that the module makes itself is out of reach.

    Refused: modules compiled by TorchScript or whose ``forward`` was replaced.
    """

    name = "contiguous-masks"
    rules = ("NTC005",)

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        calls = (entry.site for entry in context.step.ops if entry.site.fallback is not None)
        paths = dict.fromkeys(
            site.module for site in calls if site.fallback is not None and site.fallback.reason == MASK
        )
        modules = dict(context.run.model.named_modules())
        left = tuple(
            path for path in paths if path in modules and not behaves(modules[path], WithContiguousMasks)
        )
        if left:
            yield ContiguousMasks(left)
