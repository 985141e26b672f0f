"""A small model like a large one, for a comparison that the large one would be too slow for.

Blocks that look alike become two, and sizes become smaller by one factor; what is small is still the whole
model, called as a whole. Whether a likeness runs is tried on ``meta``, where that costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tilefit.capture.trees import tensors
from tilefit.errors import CaptureError, TilefitError
from tilefit.fixes.changes.fix import ChangeSet, RefusedError
from tilefit.fixes.changes.run import Run
from tilefit.units import count

#: Up to here a model is compared as it is: parameters (in fp64, with gradients and Adam's state), and FLOP of
#: one inference call on few inputs (the comparison does some hundred times that, at a few GFLOP/s). Choices.
FEW_PARAMETERS, FEW_FLOP = 4_000_000, 200_000_000
#: Up to here one that has no likeness is.
MOST_PARAMETERS, MOST_FLOP = 120_000_000, 5_000_000_000
#: Blocks of one kind that stay.
_BLOCKS = 2
#: By what sizes are divided, the first that the model runs with. Sizes of vocabularies, which are added to
#: no others, by more.
_FACTORS = (16, 8, 4, 2, 1)
_VOCABULARY, _MORE = 16_384, 16
#: Smaller sizes stay: kernels, heads, groups.
_SMALLEST = 64
#: Sizes of inputs: small, and unlike each other and the sizes of models. What a model does not accept is
#: left as it was, the frames of a spectrogram first.
_INPUTS: tuple[dict[str, int], ...] = (
    {"batch": 2, "tokens": 7, "frames": 7, "pixels": 48},
    {"batch": 2, "tokens": 7, "pixels": 48},
    {"batch": 2},
    {},
)


@dataclass(frozen=True)
class Likeness:
    """What is compared in place of a run.

    Attributes:
        run: On ``meta`` where it is smaller than the original; its inputs are few.
        changes: The same changes, of it; they work on few rows, too.
        scope: What it is: ``whole model``.
        is_small: Comparing it takes little time.
    """

    run: Run
    changes: tuple[ChangeSet, ...]
    scope: str
    is_small: bool


def likeness(run: Run, changes: Sequence[ChangeSet]) -> Likeness:
    """The run with few inputs, where that is cheap, else a small one like it.

    Raises:
        RefusedError: the model does not run on a copy, or is too large and has no likeness.
    """
    whole, flop = _with_few_inputs(run, changes)
    parameters = sum(p.numel() for p in run.model.parameters())
    if parameters <= FEW_PARAMETERS and flop <= FEW_FLOP:
        return whole
    for small in _smaller_ones(whole):
        try:
            flop = _flop(small.run)
            changed = small.run.on_meta()
            for change in small.changes:
                change.apply(changed)
            _flop(changed)
        except (
            TilefitError,
            RuntimeError,
            ValueError,
            AttributeError,
            TypeError,
            AssertionError,
            LookupError,
        ):
            continue  # one of other sizes may run
        is_small = sum(p.numel() for p in small.run.model.parameters()) <= 2 * FEW_PARAMETERS
        if is_small and flop <= 2 * FEW_FLOP:
            return small
    if parameters <= MOST_PARAMETERS and flop <= MOST_FLOP:
        return replace(whole, is_small=False)
    raise RefusedError(
        f"the model has {count(parameters)} parameters, too many to be compared, and none like it runs"
    )


def few_rows(change: ChangeSet) -> ChangeSet:
    """A change that does with few rows what it does with many."""
    copy: ChangeSet = _Copy(lambda size: size, ()).of(change)
    return copy


def _with_few_inputs(run: Run, changes: Sequence[ChangeSet]) -> tuple[Likeness, int]:
    """The run with the fewest inputs it accepts, and the FLOP of an inference call."""
    for sizes in _INPUTS:
        trial = replace(run, inputs=shrunken(run.inputs, sizes))
        try:
            return Likeness(trial, tuple(map(few_rows, changes)), "whole model", is_small=True), _flop(trial)
        except CaptureError as error:
            failure = error
    raise RefusedError(f"the model does not run on a copy ({failure.what})")


def _flop(run: Run) -> int:
    """FLOP of an inference call, on shapes alone."""
    trial = run.on_meta()
    trial.change(train=False, compile=False)
    return trial.capture().flop


def _smaller_ones(whole: Likeness) -> Iterator[Likeness]:
    """Small models like one, the smallest first; they may not run."""
    paths = {path for change in whole.changes for path in change.modules}
    for factor in _FACTORS:
        run = whole.run.on_meta()
        left_out = tuple(_fewer_blocks(run.model, paths))
        sizes = {s for tensor in _state(run.model) for s in tensor.shape if s >= _SMALLEST}
        smaller = {size: _smaller(size, factor) for size in sizes}
        _narrow(run.model, smaller)
        run.inputs = tree_map_only(torch.Tensor, partial(_cut, smaller=smaller), run.inputs)
        copy = _Copy(partial(_smaller, factor=factor), left_out)
        changes = tuple(map(copy.of, whole.changes))
        if _Dropped not in changes:
            scope = f"a model like it, of {count(sum(p.numel() for p in run.model.parameters()))} parameters"
            yield Likeness(run, changes, scope, is_small=True)


def _smaller(size: int, factor: int) -> int:
    """A smaller size, as far from a multiple of eight as this one."""
    if size < _SMALLEST or factor == 1:
        return size
    factor *= _MORE if size > _VOCABULARY else 1
    if size % (8 * factor) == 0:
        return size // factor
    aligned = -(-size // 8) * 8
    return -(-aligned // (8 * factor)) * 8 - (aligned - size)


def _state(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _fewer_blocks(model: nn.Module, paths: Iterable[str]) -> Iterator[str]:
    """Leave out blocks that look alike and are changed alike, but for the first ones; their paths."""
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        seen: Counter[Any] = Counter()
        for key, child in list(module.named_children()):
            path = f"{name}.{key}" if name else key
            inside = tuple(sorted(p.removeprefix(path) for p in paths if f"{p}.".startswith(f"{path}.")))
            seen[repr(child), inside] += 1
            if seen[repr(child), inside] > _BLOCKS:
                # The others keep their names.
                del module._modules[key]
                yield path


# ---- smaller sizes -----------------------------------------------------------------------------


def _narrow(model: nn.Module, smaller: Mapping[int, int]) -> None:
    """Make parameters, buffers, and whatever modules and configurations note of their sizes smaller."""
    cut: dict[int, torch.Tensor] = {}
    noted: dict[int, Any] = {}
    for module in model.modules():
        held: Any
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in cut:
                    new = _cut(tensor.detach(), smaller).clone()
                    is_parameter = isinstance(tensor, nn.Parameter)
                    cut[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                    noted[id(tensor)] = tensor  # kept, so that its id stays its own
                held[name] = cut[id(tensor)]
        for note in (module, getattr(module, "config", None)):
            if hasattr(note, "__dict__") and id(note) not in noted:
                noted[id(note)] = note
                for name, value in vars(note).items():
                    if not name.startswith("_"):
                        vars(note)[name] = _renamed(value, smaller)


def _renamed(value: Any, smaller: Mapping[int, int]) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return smaller.get(value, value)
    if type(value) in (tuple, list):
        return type(value)(_renamed(each, smaller) for each in value)
    return value


def _cut(tensor: torch.Tensor, smaller: Mapping[int, int]) -> torch.Tensor:
    """The beginning of a tensor."""
    return tensor[tuple(slice(smaller.get(size, size)) for size in tensor.shape)]


class _Dropped:
    """Takes the place of what mentions a module that is left out."""


@dataclass(frozen=True)
class _Copy:
    """Copies what changes are made of: data, with other sizes, without some modules."""

    size: Callable[[int], int]
    left_out: Sequence[str]

    def of(self, value: Any) -> Any:
        if isinstance(value, str):
            gone = any(value == path or value.startswith(f"{path}.") for path in self.left_out)
            return _Dropped if gone else value
        if isinstance(value, int) and not isinstance(value, bool):
            return self.size(value)
        if isinstance(value, tuple):
            return self._tuple(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: self.of(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
            fields |= {"least_rows": 0} if "least_rows" in fields else {}
            if isinstance(value, ChangeSet) and fields["modules"] is not _Dropped:
                fields = {name: () if each is _Dropped else each for name, each in fields.items()}
            return _Dropped if _Dropped in fields.values() else replace(value, **fields)
        return value

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        made = [self.of(each) for each in value]
        left = [each for each in made if each is not _Dropped]
        is_record = hasattr(value, "_fields") or len({*map(type, value)}) > 1
        if made and (not left or (is_record and len(left) < len(made))):
            return _Dropped
        return type(value)(*left) if hasattr(value, "_fields") else tuple(left)


def shrunken(inputs: Any, sizes: Mapping[str, int] = _INPUTS[-2]) -> Any:
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

    def shrunken(leaf: torch.Tensor) -> torch.Tensor:
        for axis, size in enumerate(leaf.shape):
            leaf = leaf.narrow(axis, 0, min(size, sizes.get(kind(leaf, axis), size)))
        return leaf.contiguous()

    return tree_map_only(torch.Tensor, shrunken, dict(inputs) if isinstance(inputs, Mapping) else inputs)
