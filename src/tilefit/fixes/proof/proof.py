"""Proves changes on a model: the whole of it, or of a small one like it, in all that people do with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tilefit.capture.copies import copied
from tilefit.capture.dtypes import AMP_DTYPES
from tilefit.errors import CaptureError
from tilefit.fixes.changes.fix import ChangeSet, RefusedError
from tilefit.fixes.changes.run import Run
from tilefit.fixes.proof.likeness import Likeness, few_rows, likeness, shrunken
from tilefit.fixes.proof.scenarios import SCENARIOS, Trial
from tilefit.fixes.proof.verification import (
    TOLERANCES,
    Difference,
    Verification,
    compared,
    judged,
    verify_in_place,
)

#: No model is given numbers larger or smaller than these; what memory holds by chance often is.
_LARGEST_INPUT, _SMALLEST_INPUT = 1e9, 1e-18
#: Inputs are compared at this size: a softmax or a product of far larger ones magnifies rounding errors
#: until two ways of computing the same thing differ.
_COMPARED_INPUT = 10.0
#: Parts that are called by themselves, at most: equal ones once. A choice.
_MOST_PARTS = 24


def prove(run: Run, changes: Sequence[ChangeSet]) -> Verification:
    """Compare the run's model with and without the changes on the CPU, in every scenario, on few inputs: the
    run's, random ones for those without values, smaller ones for large ones (:func:`_comparable`).

    The model itself is not touched. A parameter without a value (on ``meta``), or with one value everywhere
    (a bias of zeros), gets random ones. A large model is compared in a small one like it.

    Raises:
        RefusedError: the comparison cannot be made.
    """
    # As a default, the CPU sees every call, and takes its time.
    is_default = torch.get_default_device().type == "cpu"
    with nullcontext() if is_default else torch.device("cpu"), _comparing():
        return _compared(likeness(run, changes))


def prove_in_place(run: Run, changes: Sequence[ChangeSet]) -> Verification:
    """Compare the model with and without the changes where it is, in its working precision, on two samples
    of the run's inputs; random ones where these have no values or one, smaller ones where they are large.

    Raises:
        RefusedError: a change does not apply, or the comparison cannot be made.
    """
    with _comparing():
        few = with_values(shrunken(run.inputs), run.model)
        return verify_in_place(replace(run, inputs=few), map(few_rows, changes))


@contextmanager
def _comparing() -> Iterator[None]:
    """Within the block random numbers on the CPU are the same every time; afterwards the user's go on.

    Raises:
        RefusedError: the model raises in the comparison (in fp64, on few inputs, on a copy).
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # and no GPU's
        try:
            yield
        except RefusedError:
            raise
        except CaptureError as error:
            raise RefusedError(f"the model does not run on a copy ({error.what})") from error
        except Exception as error:
            text = (str(error).strip() or "no message").splitlines()[0]
            raise RefusedError(f"the comparison raised {type(error).__name__}: {text.rstrip('.')}") from error


def _compared(like: Likeness) -> Verification:
    run, amp = like.run, like.run.options.autocast
    original = copied(run.model, "cpu").double()
    _fill(original, run.model)
    fixed = _changed(run, original, like.changes)
    same_numbers = all(change.same_random_numbers for change in like.changes)
    inputs = with_values(run.inputs, run.model)
    trial = Trial(inputs, run.loss, same_random_numbers=same_numbers, train=run.options.train)
    trial = replace(trial, parts=_parts(trial, original, like.changes))
    own = next((p.dtype for p in run.model.parameters() if p.is_floating_point()), torch.float32)
    working = replace(trial, dtype=own, amp=amp), AMP_DTYPES.get(amp, own)
    parameters = sum(p.numel() for p in original.parameters()) if like.is_small else float("inf")
    differences: list[Difference] = []
    count, worst = 0, 0.0
    for scenario in SCENARIOS:
        if parameters > scenario.most or (scenario.training and not trial.train) or differences:
            continue
        how, dtype = working if scenario.working else (trial, torch.float64)
        errors = compared(scenario, how, original, fixed, must_run=scenario in SCENARIOS[:2])
        count += len(errors)
        differences += [each for each in errors if not each.error <= TOLERANCES[dtype]]
        if dtype == torch.float64:
            worst = max([worst, *(each.error for each in errors)])
    found = judged((), like.scope, torch.float64, "cpu")
    return replace(found, compared=count, worst=worst, differences=tuple(differences))


def _changed(run: Run, original: nn.Module, changes: Sequence[ChangeSet]) -> nn.Module:
    """A changed copy of a model on the CPU."""
    trial = replace(run, model=copied(original, "cpu"), live_optimizer=None)
    for change in changes:
        change.apply(trial)
    return trial.model


def _parts(trial: Trial, model: nn.Module, changes: Sequence[ChangeSet]) -> dict[str, tuple[Any, Any]]:
    """Changed modules and all that they are parts of, with the arguments of their first calls; of those that
    look alike the first."""
    paths: dict[str, None] = {}
    for change in changes:
        for path in change.modules:
            while path:
                paths[path] = None
                path = path.rpartition(".")[0]
    modules = dict(model.named_modules())
    distinct = {repr(modules[path]): path for path in reversed(paths) if path in modules}
    arguments: dict[str, tuple[Any, Any]] = {}

    def record(module: nn.Module, args: Any, kwargs: Any, path: str) -> None:
        if path not in arguments:
            arguments[path] = trial.fresh((args, kwargs))  # before the module changes them

    handles = [
        modules[path].register_forward_pre_hook(partial(record, path=path), with_kwargs=True)
        for path in [*distinct.values()][:_MOST_PARTS]
    ]
    mode = model.training
    try:
        with trial.running(), torch.no_grad():
            trial.called(model.eval(), trial.fresh())
    finally:
        model.train(mode)
        for handle in handles:
            handle.remove()
    return arguments


@torch.no_grad()
def _fill(module: nn.Module, source: nn.Module) -> None:
    """Random values where ``source`` has none or one."""
    known = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    for name, tensor in module.named_parameters():
        if known[name].is_meta or (tensor == tensor.flatten()[:1]).all():
            if tensor.dim() > 1:
                tensor.normal_(std=tensor[0].numel() ** -0.5)
            else:
                tensor.uniform_(0.5, 1.5)
    for name, buffer in module.named_buffers():
        if known[name].is_meta and buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)


# ---- values ------------------------------------------------------------------------------------


def _is_mask(leaf: torch.Tensor) -> bool:
    """Two values, of which minus infinity or the smallest number may be one."""
    return bool(leaf.max() <= 1) and torch.unique(leaf).numel() == 2


def _comparable(leaf: torch.Tensor) -> torch.Tensor:
    """Values a model can be compared on: random ones for what lay in memory (``torch.empty``, given for its
    shape), smaller ones for large numbers."""
    if not leaf.is_floating_point() or _is_mask(leaf):
        return leaf.cpu()
    largest = leaf.abs().max().double().item()
    if not _SMALLEST_INPUT <= largest <= _LARGEST_INPUT:
        return torch.randn(leaf.shape)
    return leaf.cpu() * min(_COMPARED_INPUT / largest, 1.0)


def with_values(inputs: Any, model: nn.Module) -> Any:
    """The inputs on the CPU; random where they have no values or one, indices within every table."""
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    most = min(tables, default=2)

    def real(leaf: torch.Tensor, name: str = "") -> torch.Tensor:
        if not leaf.is_meta and leaf.numel() and not (leaf == leaf.flatten()[:1]).all():
            return _comparable(leaf)
        if leaf.is_floating_point():
            return torch.randn(leaf.shape)
        if leaf.dtype == torch.bool or "mask" in name:
            return torch.ones(leaf.shape, dtype=leaf.dtype)
        return torch.randint(0, most, leaf.shape).to(leaf.dtype)

    if isinstance(inputs, Mapping):
        return {n: tree_map_only(torch.Tensor, partial(real, name=n), value) for n, value in inputs.items()}
    return tree_map_only(torch.Tensor, real, inputs)
