"""Run the optimizer as one fused kernel."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from tilefit.capture.optimizer import MakeOptimizer
from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal, RefusedError
from tilefit.fixes.run import Run

#: Optimizers with a fused kernel for CUDA in every supported version of PyTorch.
_FUSED: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True)
class FusedOptimizer(ChangeSet):
    """``fused=True`` for the optimizer.

    Attributes:
        optimizer: Its name in lower case.
    """

    optimizer: str

    words = "Run {0.optimizer} as one fused kernel (fused=True)."

    def make(self, run: Run, edits: Edits) -> None:
        own = set(run.model.parameters())
        groups = run.live_optimizer.param_groups if run.live_optimizer is not None else []
        # That of a model of which this is a copy stays as it is.
        if run.live_optimizer is not None and any(p in own for group in groups for p in group["params"]):
            _fuse(run.live_optimizer, edits)
        edits.run(run, fused_optimizer=True)


def like(optimizer: torch.optim.Optimizer, model: nn.Module) -> MakeOptimizer:
    """Makes optimizers of the same class, options and groups, without state, for copies of ``model``: of the
    list of a copy's trainable parameters."""
    numbers = {p: number for number, p in enumerate(p for p in model.parameters() if p.requires_grad)}
    groups = [
        (group, [numbers[p] for p in group["params"] if p in numbers]) for group in optimizer.param_groups
    ]

    def made(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        other = copy.copy(optimizer)  # whatever arguments its class takes
        other.state = defaultdict(dict)
        other.param_groups = [
            {**group, "params": [parameters[number] for number in chosen]} for group, chosen in groups
        ]
        return other

    return made


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all of it runs fused."""
    return all(group.get("fused") for group in optimizer.param_groups)


class FuseOptimizer(Fix):
    """Turns on ``fused=True`` of Adam, AdamW and SGD.

    The update rule is the same; one kernel reads and writes parameters, gradients and state once, where the
    default streams them through memory for every operation of the rule. The optimizer that is passed in is
    changed itself, half-trained or not: its state stays, but that the step counts of Adam move to the
    parameters' device, as a fused optimizer keeps them; ``state_dict`` loads into an optimizer without
    ``fused`` and back. ``capturable`` and all other options stay. Gradients are still unscaled by a
    ``GradScaler``, whatever groups the optimizer gets later. The optimizer of the original stays as it is
    where a copy of the model is changed.

    Without an optimizer passed in the plan says to construct it with ``fused=True``.

    Refused: an optimizer of another class, ``differentiable=True``, ``foreach=False`` (someone asked for
    one kernel per tensor), parameters that are not floating-point, sparse gradients.
    """

    name = "fuse-optimizer"
    rules = ("NTC003",)

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        settings = context.step.settings
        if settings.training and settings.optimizer in _FUSED and not settings.fused_optimizer:
            yield FusedOptimizer((), settings.optimizer)


def _fuse(optimizer: torch.optim.Optimizer, edits: Edits) -> None:
    _require_fusable(optimizer)
    kept = [{name: group[name] for name in ("fused", "foreach")} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=None)
    _place_steps(optimizer)

    def undo() -> None:
        for group, options in zip(optimizer.param_groups, kept, strict=False):  # it may have got more groups
            group.update(options)
        _place_steps(optimizer)

    edits.undone_by(undo)


def _place_steps(optimizer: torch.optim.Optimizer) -> None:
    """Keep the step counts where the groups' options say: with the parameters, or on the host."""
    for group in optimizer.param_groups:
        with_parameters = group["fused"] or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "step" in state:
                state["step"] = state["step"].to(parameter.device if with_parameters else "cpu")


def _require_fusable(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer)
    if kind not in _FUSED.values():
        raise RefusedError(
            f"the optimizer is a {kind.__module__}.{kind.__qualname__}, of which no fused form is known"
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise RefusedError("the optimizer is differentiable, which the fused kernel is not")
        if group["foreach"] is False:
            raise RefusedError("the optimizer was told to update one tensor at a time (foreach=False)")
        for parameter in group["params"]:
            if not parameter.is_floating_point():
                raise RefusedError(f"the optimizer updates a parameter of type {parameter.dtype}")
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise RefusedError("the optimizer updates a parameter whose gradient is sparse")
