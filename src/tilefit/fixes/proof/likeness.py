"""What is compared in place of a run: a small model like a large one, on few inputs that have values.

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
from torch.utils._pytree import tree_map_only, tree_map_with_path

from tilefit.capture.copies import copied
from tilefit.capture.trees import tensors
from tilefit.errors import CaptureError
from tilefit.fixes.changes.fix import ChangeSet, RefusedError, applied
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
#: No model is given numbers larger or smaller than these; what memory holds by chance often is.
_LARGEST_INPUT, _SMALLEST_INPUT = 1e9, 1e-18
#: Inputs are compared at this size: a softmax or a product of far larger ones magnifies rounding errors
#: until two ways of computing the same thing differ.
_COMPARED_INPUT = 10.0


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
    parameters = _parameters(run.model)
    if parameters <= FEW_PARAMETERS and flop <= FEW_FLOP:
        return whole
    for small in _smaller_ones(whole):
        try:
            flop = _flop(small.run)
            with applied(small.run, small.changes):
                _flop(small.run)
        except Exception:  # noqa: BLE001 - one of other sizes may run
            continue
        if _parameters(small.run.model) <= 2 * FEW_PARAMETERS and flop <= 2 * FEW_FLOP:
            return small
    if parameters <= MOST_PARAMETERS and flop <= MOST_FLOP:
        return replace(whole, is_small=False)
    raise RefusedError(
        f"the model has {count(parameters)} parameters, too many to be compared, and none like it runs"
    )


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def few_rows(change: ChangeSet) -> ChangeSet:
    """A change that does with few rows what it does with many."""
    copy: ChangeSet = _translated(change, lambda size: size, ())
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
        state = (*run.model.parameters(), *run.model.buffers())
        sizes = {size for tensor in state for size in tensor.shape if size >= _SMALLEST}
        smaller = {size: _smaller(size, factor) for size in sizes}
        _narrow(run.model, smaller)
        run.inputs = tree_map_only(torch.Tensor, partial(_cut, smaller=smaller), run.inputs)
        of = partial(_translated, size=partial(_smaller, factor=factor), left_out=left_out)
        changes = tuple(map(of, whole.changes))
        if _Dropped not in changes:
            scope = f"a model like it, of {count(_parameters(run.model))} parameters"
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
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = _cut(tensor.data, smaller).clone()

    def renamed(value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(renamed, value))
        return smaller.get(value, value) if type(value) is int else value

    noting = (note for module in model.modules() for note in (module, getattr(module, "config", None)))
    for note in {id(note): note for note in noting if hasattr(note, "__dict__")}.values():
        vars(note).update({k: renamed(v) for k, v in vars(note).items() if not k.startswith("_")})


def _cut(tensor: torch.Tensor, smaller: Mapping[int, int]) -> torch.Tensor:
    """The beginning of a tensor."""
    return tensor[tuple(slice(smaller.get(size, size)) for size in tensor.shape)]


class _Dropped:
    """Takes the place of what mentions a module that is left out."""


def _translated(value: Any, size: Callable[[int], int], left_out: Sequence[str]) -> Any:
    """What changes are made of: data, with other sizes, without some modules."""
    of = partial(_translated, size=size, left_out=left_out)
    if isinstance(value, str):
        return _Dropped if any(f"{value}.".startswith(f"{path}.") for path in left_out) else value
    if isinstance(value, tuple):
        made = [*map(of, value)]
        left = [each for each in made if each is not _Dropped]
        is_record = hasattr(value, "_fields") or len({*map(type, value)}) > 1
        if made and (not left or (is_record and len(left) < len(made))):
            return _Dropped
        return type(value)(*left) if hasattr(value, "_fields") else tuple(left)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: of(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        fields |= {"least_rows": 0} if "least_rows" in fields else {}
        if isinstance(value, ChangeSet) and fields["modules"] is not _Dropped:
            fields = {name: () if each is _Dropped else each for name, each in fields.items()}
        return _Dropped if _Dropped in fields.values() else replace(value, **fields)
    return size(value) if type(value) is int else value


# ---- inputs, and values ------------------------------------------------------------------------


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


def with_values(inputs: Any, model: nn.Module) -> Any:
    """The inputs on the CPU; random where they have no values or one, indices within every table."""
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]

    def real(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if _has_values(leaf):
            return _comparable(leaf)
        if leaf.is_floating_point():
            return torch.randn(leaf.shape)
        if leaf.dtype == torch.bool or "mask" in "".join(map(str, path)):
            return torch.ones(leaf.shape, dtype=leaf.dtype)
        return torch.randint(0, min(tables, default=2), leaf.shape).to(leaf.dtype)

    return tree_map_with_path(real, dict(inputs) if isinstance(inputs, Mapping) else inputs)


@torch.no_grad()
def filled(model: nn.Module) -> nn.Module:
    """A copy of a model on the CPU in fp64, with random parameters where they have no values or one."""
    made = copied(model, "cpu").double()
    for parameter, own in zip(made.parameters(), model.parameters(), strict=True):
        if not _has_values(own):
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    for buffer, given in zip(made.buffers(), model.buffers(), strict=True):
        if given.is_meta and buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    return made


def _has_values(tensor: torch.Tensor) -> bool:
    """More than one."""
    return not tensor.is_meta and bool((tensor != tensor.flatten()[:1]).any())


def _comparable(leaf: torch.Tensor) -> torch.Tensor:
    """Values a model can be compared on: random ones for what lay in memory (``torch.empty``, given for its
    shape), smaller ones for large numbers."""
    # A mask has two values, of which minus infinity or the smallest number may be one.
    if not leaf.is_floating_point() or (leaf.max() <= 1 and torch.unique(leaf).numel() == 2):
        return leaf.cpu()
    largest = leaf.abs().max().double().item()
    if not _SMALLEST_INPUT <= largest <= _LARGEST_INPUT:
        return torch.randn(leaf.shape)
    return leaf.cpu() * min(_COMPARED_INPUT / largest, 1.0)
