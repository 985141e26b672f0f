"""Compute modules again in the backward pass, where a step needs more memory than there is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tilefit import units
from tilefit.cost.recompute import CALL_S, NORMALIZATION, Recompute
from tilefit.fixes.changes.behaviour import Behaviour, Edits
from tilefit.fixes.changes.calls import is_transformed
from tilefit.fixes.changes.fix import ChangeSet, Context, Found, RefusedError, Stage, fix
from tilefit.fixes.changes.modules import submodule
from tilefit.fixes.changes.run import Run

#: What is aimed at, as shares of the budget: what a choice takes is predicted first, and captured then.
_AIMS = (1.0, 0.98, 0.95, 0.9, 0.8)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True)
class Checkpoint(Behaviour):
    """The module's call keeps its arguments alone, and is made again when its backward pass begins.

    Random numbers are drawn as the first time, and autocast is as then. Statistics that normalisation keeps
    of its batches are put aside, so that a batch counts once; a cache that the module adds to is given to the
    second call as it was before the first.
    """

    def require(self, module: nn.Module, path: str) -> None:
        super().require(module, path)
        if reason := unfit(module):
            raise RefusedError(f"{path} {reason}")

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or is_transformed():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler traces the call once, and takes care of the second
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        first, before = True, _snapshot((args, kwargs))

        def run(args: Any, kwargs: Any) -> Any:
            nonlocal first
            if first:
                first = False
            else:
                args, kwargs = _snapshot(before)
            return forward(*args, **kwargs)

        contexts = lambda: (nullcontext(), _StatisticsAside(module))  # noqa: E731
        # Of keywords PyTorch would not see the device, whose random state is to be kept.
        return checkpoint(run, args, kwargs, use_reentrant=False, context_fn=contexts)


def _snapshot(value: Any, known: dict[int, Any] | None = None) -> Any:
    """The same tensors, in lists, dictionaries and objects of their own; ``known``: copies by their
    originals' ids, as what is in two places is one thing."""
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)]
    if type(value) is tuple:
        return tuple(_snapshot(each, known) for each in value)
    is_object = hasattr(value, "__dict__") and not isinstance(value, torch.Tensor | nn.Module | Enum)
    if not isinstance(value, list | dict) and (not is_object or callable(value)):
        return value
    other = known[id(value)] = copy.copy(value)
    if isinstance(value, list):
        other[:] = [_snapshot(each, known) for each in value]
    elif isinstance(value, dict):
        other.update({key: _snapshot(each, known) for key, each in value.items()})
    if is_object:
        vars(other).update({name: _snapshot(each, known) for name, each in vars(value).items()})
    return other


class _StatisticsAside:
    """Within the block, what normalisation learns of its batch goes to copies of its buffers. A graph that is
    kept runs backward more than once, and enters it each time."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> None:
        for part in self._module.modules():
            if isinstance(part, _NormBase):
                buffers: dict[str, Any] = part._buffers
                self._kept.append((buffers, dict(buffers)))
                buffers.update(
                    {name: each if each is None else each.clone() for name, each in buffers.items()}
                )

    def __exit__(self, *error: object) -> None:
        while self._kept:
            buffers, kept = self._kept.pop()
            buffers.update(kept)


@dataclass(frozen=True)
class Checkpointed(ChangeSet):
    """Modules that are computed again.

    Attributes:
        saved_bytes: By which the peak of memory is predicted to fall.
    """

    saved_bytes: int = 0

    def make(self, run: Run, edits: Edits) -> None:
        ChangeSet.giving(self.modules, Checkpoint(), "").make(run, edits)


def unfit(module: nn.Module) -> str:
    """Why a module cannot be called twice for one step; empty where nothing is known that speaks against."""
    if type(module).forward in (nn.Module.forward, nn.ModuleList.forward):
        return "is never called"
    for part in module.modules():
        if part is not module and any(getattr(part, hooks) for hooks in _HOOKS):
            return "has hooks within it, which would see two calls"
        if parametrize.is_parametrized(part):
            return "has parametrisations, which may keep a state"
        if NORMALIZATION.search(type(part).__name__) and part._buffers and not isinstance(part, _NormBase):
            return "keeps statistics in a way of its own"
        if part.__dict__.get("gradient_checkpointing"):
            return "is checkpointed by its own library"
    return ""


@fix("checkpoint", "BAT002", stage=Stage.FIT)
def compute_again(context: Context) -> Found:
    """Wraps modules in ``torch.utils.checkpoint`` where a training step needs more memory than it may take.

    What autograd keeps of such a module between its forward and its backward pass is dropped and computed
    again; the numbers are the same, bit for bit where the kernels are deterministic, since random numbers,
    autocast and arguments are those of the first call. Which modules: those that cost the least GPU time for
    each byte that they free at the fullest moment of the step, until it fits; the changed step is captured
    again to see that it does. It makes a step slower, and is proposed only where it does not fit into
    ``memory_budget``, or into the GPU.

    Refused: modules with hooks on their parts, parametrisations, buffers that they write (other than
    statistics of normalisation, which are put aside while the module runs again), or parameters that they
    use twice.
    """
    step, memory = context.step, context.step.memory
    budget_bytes = context.run.budget_bytes(context.gpu)
    if not step.settings.training or memory.peak_bytes <= budget_bytes or not memory.timeline.events:
        return
    search = Recompute(step, context.estimate.ops, partial(_is_fit, context.run.model))
    tried: set[tuple[str, ...]] = set()
    for aim in _AIMS:
        found = search.within(aim * budget_bytes)
        if found.modules and found.modules not in tried:
            tried.add(found.modules)
            saved_bytes, many = memory.peak_bytes - found.peak_bytes, len(found.modules)
            words = (
                f"Compute {many} modules again in the backward pass (torch.utils.checkpoint): "
                f"{units.capacity(saved_bytes)} less for {units.seconds(found.extra_s)} of GPU time."
            )
            yield Checkpointed(found.modules, saved_bytes, words=words, host_s=CALL_S * many)


def _is_fit(model: nn.Module, path: str) -> bool:
    """Whether a module of a model can be computed again, and is not yet."""
    try:
        Checkpoint().require(submodule(model, path), path)
    except RefusedError:
        return False
    return True
