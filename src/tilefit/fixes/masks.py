"""Masks of attention, contiguous, so that its fused kernels take them."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

from tilefit.fixes.behaviour import Behaviour, behaves
from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal
from tilefit.fixes.modules import behave, submodule
from tilefit.fixes.run import Run
from tilefit.ops.entries import MASK


@dataclass(frozen=True)
class WithContiguousMasks(Behaviour):
    """The module, given masks whose last dimension is contiguous.

    Attributes:
        masks: Position and name of the arguments that are passed on to attention.
    """

    masks: tuple[tuple[int, str], ...]

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = list(args)
        copies = []
        for position, name in self.masks:
            holder, key = (given, position) if position < len(given) else (kwargs, name)
            mask = given[position] if position < len(given) else kwargs.get(name)
            if isinstance(mask, torch.Tensor) and mask.dim() > 1 and mask.stride(-1) != 1:
                holder[key] = mask.contiguous()  # type: ignore[index]
                copies.append((mask, holder[key], _version(holder[key])))  # type: ignore[index]
        output = forward(*given, **kwargs)
        for mask, copy, version in copies:
            if version != _version(copy):  # what was written was meant for whoever gave the mask
                mask.copy_(copy)
        return output


def _version(tensor: torch.Tensor) -> int:
    return 0 if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class ContiguousMasks(ChangeSet):
    """Modules that pass the mask they are given on to attention.

    Attributes:
        masks: Position and name of the arguments.
    """

    #: A fused kernel draws its own random numbers for dropout.
    same_random_numbers: ClassVar[bool] = False

    masks: tuple[tuple[int, str], ...]

    words = "Make the mask that {0.where} is given contiguous, so that attention is fused."

    def make(self, run: Run, edits: Edits) -> None:
        behave(run, edits, self.modules, WithContiguousMasks(self.masks))


class MakeMasksContiguous(Fix):
    """Makes the mask of attention contiguous where its layout keeps PyTorch from the fused kernels.

    Masks that were expanded or permuted have a last dimension that is not contiguous. Where a module is given
    such a mask and passes it on to ``scaled_dot_product_attention``, it is called with a copy that is
    contiguous: the same values. Which argument that is was seen in a call; others (a cache of keys and values
    that is written to) are passed as they are, as is a mask that is contiguous. The copy is made for each of
    the modules; the compiler makes it once for all.

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
        left = [path for path in paths if path in modules and not behaves(modules[path], WithContiguousMasks)]
        alike: dict[Any, list[str]] = defaultdict(list)
        for path, masks in (_masks(context.run, left) if left else {}).items():
            alike[tuple(sorted(masks))].append(path)
        for found, together in alike.items():
            yield ContiguousMasks(tuple(together), found)


def _masks(run: Run, paths: Iterable[str]) -> dict[str, set[tuple[int, str]]]:
    """By module, the arguments that reach ``scaled_dot_product_attention`` as masks."""
    trial = run.on_meta()
    trial.change(train=False)
    found: dict[str, set[tuple[int, str]]] = {path: set() for path in paths}
    #: The modules that are being called, with their arguments.
    calls: list[tuple[str, dict[tuple[int, str], Any]]] = []
    plain = F.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Any:
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        for path, given in calls if mask is not None else ():
            found[path] |= {place for place, value in given.items() if _root(value) is _root(mask)}
        return plain(*args, **kwargs)

    def entering(path: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            names = list(inspect.signature(module.forward).parameters)
            named = {(names.index(name), name): value for name, value in kwargs.items() if name in names}
            calls.append((path, dict(zip(enumerate(names), args, strict=False)) | named))

        return enter

    # Functions, which the copies that are captured share.
    for path in paths:
        module = submodule(trial.model, path)
        module.register_forward_pre_hook(entering(path), with_kwargs=True)
        module.register_forward_hook(lambda *_: calls.pop() and None)
    with patch.object(F, "scaled_dot_product_attention", attention):
        trial.capture()
    return {path: masks for path, masks in found.items() if masks}


def _root(value: Any) -> Any:
    """The tensor that a tensor is a view of."""
    return value._base if isinstance(value, torch.Tensor) and value._base is not None else value
