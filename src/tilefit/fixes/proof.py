"""Proves a candidate on a model: on the whole model where that is cheap, else on each module it changes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tilefit.capture.copies import copied
from tilefit.capture.trees import tensors
from tilefit.errors import CaptureError
from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, RefusedError
from tilefit.fixes.linear import on_any_rows
from tilefit.fixes.run import Run
from tilefit.fixes.verification import Verification, join, verify, verify_in_place
from tilefit.ops import Step
from tilefit.units import count

#: Up to here a whole model is compared: parameters (in fp64, with gradients and Adam's state), and FLOP of
#: one inference call on the small inputs (the comparison does some hundred times that, at a few GFLOP/s).
WHOLE_MODEL_PARAMETERS = 20_000_000
WHOLE_MODEL_FLOP = 500_000_000
#: Up to here a module is compared as it is, above in miniature.
SCOPE_PARAMETERS = 50_000_000
#: Up to here optimizer steps are compared too.
STEPPED_PARAMETERS = 2_000_000
#: Sizes of the comparison: small, and unlike each other and the sizes of models. What a model does not accept
#: is left as it was, the frames of a spectrogram first.
_SIZES: tuple[dict[str, int], ...] = (
    {"batch": 2, "tokens": 7, "frames": 7, "pixels": 48},
    {"batch": 2, "tokens": 7, "pixels": 48},
    {"batch": 2},
    {},
)

#: Inputs of modules by path.
Arguments = dict[str, Any]


#: No model is given numbers larger or smaller than these; what memory holds by chance often is.
_LARGEST_INPUT, _SMALLEST_INPUT = 1e9, 1e-18
#: Inputs are compared at this size: a softmax or a product of far larger ones magnifies rounding errors
#: until two ways of computing the same thing differ.
_COMPARED_INPUT = 10.0


def prove(run: Run, candidate: ChangeSet) -> Verification:
    """Compare the run's model with and without the candidate, in fp64 on the CPU, on few inputs: the run's,
    random ones for those without values, smaller ones for large ones (:func:`_comparable`).

    The model itself is not touched. A parameter without a value (on ``meta``), or with one value everywhere
    (a bias of zeros), gets random ones.

    Raises:
        RefusedError: the comparison cannot be made.
    """
    with torch.device("cpu"), _seeded(), _as_refusals():  # whatever device new tensors go to by default
        return _proof(run, candidate)


def prove_in_place(run: Run, candidate: ChangeSet) -> Verification:
    """Compare the model with and without the candidate where it is, in its working precision, on two samples
    of the run's inputs; random ones where these have no values or one, smaller ones where they are large.

    Raises:
        RefusedError: the candidate does not apply, or the comparison cannot be made.
    """

    def change(run: Run, edits: Edits) -> None:
        candidate.apply(run, edits)
        on_any_rows(run.model, edits)

    with _seeded(), _as_refusals():
        few = _with_values(_shrunken(run.inputs, _SIZES[-2]), run.model)
        return verify_in_place(replace(run, inputs=few), change)


@contextmanager
def _seeded() -> Iterator[None]:
    """Within the block random numbers on the CPU are the same every time; afterwards the user's go on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@contextmanager
def _as_refusals() -> Iterator[None]:
    """A model that raises in the comparison (in fp64, on few inputs, on a copy) is left alone."""
    try:
        yield
    except RefusedError:
        raise
    except CaptureError as error:
        raise RefusedError(f"the model does not run on a copy ({error.what})") from error
    except Exception as error:
        text = (str(error).strip() or "no message").splitlines()[0]
        raise RefusedError(f"the comparison raised {type(error).__name__}: {text}") from error


def _proof(run: Run, candidate: ChangeSet) -> Verification:
    inputs, step, arguments = _small_inputs(run, candidate.scopes)
    parameters = sum(p.numel() for p in run.model.parameters())
    if not candidate.scopes or (parameters <= WHOLE_MODEL_PARAMETERS and step.flop <= WHOLE_MODEL_FLOP):
        return _compare(run, candidate, "", inputs)
    missing = [path for path in candidate.scopes if path not in arguments]
    if missing:
        raise RefusedError(f"{missing[0]} was not called, so that nobody knows its inputs")
    # Modules that look alike are changed alike.
    distinct = {repr(run.model.get_submodule(path)): path for path in reversed(candidate.scopes)}
    return join([_compare_scope(run, candidate, path, arguments[path]) for path in distinct.values()])


def _compare_scope(run: Run, candidate: ChangeSet, path: str, inputs: Any) -> Verification:
    """Compare the module at ``path``, or a small one like it where it is too large."""
    parameters = sum(p.numel() for p in run.model.get_submodule(path).parameters())
    if parameters <= SCOPE_PARAMETERS:
        return _compare(run, candidate, path, inputs)
    small = run.on_meta()
    made = candidate.miniature(small)
    if made is None:
        raise RefusedError(f"{path} has {count(parameters)} parameters, too many to be compared here")
    candidate, sizes = made
    inputs = tree_map(partial(_resized, sizes), inputs)
    return replace(_compare(small, candidate, path, inputs), scope=f"{path} (in miniature)")


def _resized(sizes: Mapping[int, int], leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.dim():
        return leaf
    return leaf.new_empty((*leaf.shape[:-1], sizes.get(leaf.shape[-1], leaf.shape[-1])))


def _compare(run: Run, candidate: ChangeSet, path: str, inputs: Any) -> Verification:
    """Compare the module at ``path``; the empty path is the whole model."""
    original = _real_scope(run, path)[1]
    _fill(original, run.model.get_submodule(path))
    trial, fixed = _real_scope(run, path)
    candidate.apply(trial)
    for (_, to), (_, value) in zip(_state(fixed), _state(original), strict=True):
        to.data.copy_(value.data)
    on_any_rows(fixed, Edits())
    return verify(
        original,
        fixed,
        _with_values(inputs, run.model),
        loss=None if path else run.loss,
        train=run.options.train,
        # Equal gradients of the same parameters make equal steps.
        steps=3 if sum(p.numel() for p in original.parameters()) <= STEPPED_PARAMETERS else 0,
        same_random_numbers=candidate.same_random_numbers,
        scope=path or "whole model",
    )


def _real_scope(run: Run, path: str) -> tuple[Run, nn.Module]:
    """The run on ``meta`` but for the module at ``path``, which is in fp64 on the CPU; and that module."""
    trial = run.on_meta()
    scope = copied(run.model.get_submodule(path), "cpu").double()
    if path:
        trial.model.set_submodule(path, scope)
    else:
        trial.model = scope
    return trial, scope


def _state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


@torch.no_grad()
def _fill(module: nn.Module, source: nn.Module) -> None:
    """Random values where ``source`` has none or one."""
    known = dict(_state(source))
    for name, tensor in module.named_parameters():
        if known[name].is_meta or (tensor == tensor.flatten()[:1]).all():
            if tensor.dim() > 1:
                tensor.normal_(std=tensor[0].numel() ** -0.5)
            else:
                tensor.uniform_(0.5, 1.5)
    for name, buffer in module.named_buffers():
        if known[name].is_meta and buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)


# ---- few inputs --------------------------------------------------------------------------------


def _small_inputs(run: Run, scopes: tuple[str, ...]) -> tuple[Any, Step, Arguments]:
    """The smallest inputs the model accepts; the inference call with them; each scope's arguments."""
    for sizes in _SIZES:
        trial = run.on_meta()
        trial.change(train=False, compile=False)
        trial.inputs = _shrunken(run.inputs, sizes)
        arguments: Arguments = {}
        for path in scopes:
            module = trial.model.get_submodule(path)
            module.register_forward_pre_hook(_recording(arguments, path), with_kwargs=True)
        try:
            return trial.inputs, trial.capture(), arguments
        except CaptureError as error:
            failure = error
    raise RefusedError(f"the model does not run on a copy ({failure.what})")


def _recording(arguments: Arguments, path: str) -> Callable[[nn.Module, Any, Any], None]:
    def record(module: nn.Module, args: Any, kwargs: Any) -> None:
        if path not in arguments:
            found = inspect.signature(module.forward).bind(*args, **kwargs).arguments if kwargs else args
            arguments[path] = tree_map(_as_it_is, found)

    return record


def _as_it_is(leaf: Any) -> Any:
    """An argument before the module changes it (a cache of keys and values)."""
    return leaf if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


def _shrunken(inputs: Any, sizes: Mapping[str, int]) -> Any:
    """The beginning of the inputs: fewer samples, tokens, frames or pixels, as far as ``sizes`` says."""
    first = next((t for t in tensors(inputs) if t.dim()), None)
    length = next((t.shape[1] for t in tensors(inputs) if t.dim() >= 2 and not t.is_floating_point()), 0)

    def kind(tensor: torch.Tensor, axis: int) -> str:
        if axis == 0 and first is not None and tensor.shape[0] == first.shape[0]:
            return "batch"
        if tensor.dim() >= 4 and tensor.is_floating_point():
            return "pixels" if axis >= 2 else ""
        if tensor.dim() == 3 and tensor.is_floating_point():
            return "frames" if axis == 1 else ""
        return "tokens" if tensor.shape[axis] == length else ""

    def shrunken(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        for axis, size in enumerate(leaf.shape):
            leaf = leaf.narrow(axis, 0, min(size, sizes.get(kind(leaf, axis), size)))
        return leaf.contiguous()

    return tree_map(shrunken, inputs)


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


def _with_values(inputs: Any, model: nn.Module) -> Any:
    """The inputs on the CPU; random where they have no values or one, indices within every table."""
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    most = min(tables, default=2)

    def real(leaf: Any, name: str = "") -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not leaf.is_meta and leaf.numel() and not (leaf == leaf.flatten()[:1]).all():
            return _comparable(leaf)
        if leaf.is_floating_point():
            return torch.randn(leaf.shape)
        if leaf.dtype == torch.bool or "mask" in name:
            return torch.ones(leaf.shape, dtype=leaf.dtype)
        return torch.randint(0, most, leaf.shape).to(leaf.dtype)

    if isinstance(inputs, Mapping):
        return {name: tree_map(partial(real, name=name), value) for name, value in inputs.items()}
    return tree_map(real, inputs)
