"""Pad the batch of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import gcd
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tilefit.capture.forward import call
from tilefit.capture.trees import tensors
from tilefit.fixes.changes.assumed import restored
from tilefit.fixes.changes.behaviour import Behaviour
from tilefit.fixes.changes.calls import is_transformed
from tilefit.fixes.changes.edits import Edits
from tilefit.fixes.changes.fix import ChangeSet, Context, Found, Refusal, fix, refuse
from tilefit.fixes.changes.hooks import is_watched_within
from tilefit.fixes.changes.run import Run
from tilefit.ops.dtypes import elements_per_access
from tilefit.rules.alignment.padding import is_misaligned
from tilefit.rules.alignment.rows import contiguous_rows

#: Operations whose names say that they draw random numbers.
_RANDOM = ("dropout", "bernoulli", "rand", "normal_", "uniform_", "multinomial", "exponential_")


@dataclass(frozen=True)
class InWholeMultiples(Behaviour):
    """The module, with the one tensor among its arguments filled up with copies of its first row, to a
    multiple of ``rows``; of the result, the rows that were asked for.

    Copies rather than zeros, since what a model makes of zeros need not be finite. Nothing that is not
    finite reaches a gradient: the rows that are cut off get a gradient of zero.
    """

    rows: int

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves = list(tensors((args, kwargs)))
        rows = leaves[0].shape[0] if len(leaves) == 1 and leaves[0].dim() else 0
        more = -rows % self.rows if not is_transformed() and rows and not leaves[0].is_nested else 0
        if not more or (not torch.compiler.is_compiling() and is_watched_within(module)):
            return forward(*args, **kwargs)

        def fill(leaf: torch.Tensor) -> torch.Tensor:
            return torch.cat([leaf, _of_rows(leaf, more)])

        def cut(leaf: torch.Tensor) -> torch.Tensor:
            return leaf[:rows] if leaf.dim() and leaf.shape[0] == rows + more else leaf

        args, kwargs = tree_map_only(torch.Tensor, fill, (args, kwargs))
        return tree_map_only(torch.Tensor, cut, forward(*args, **kwargs))


def _of_rows(leaf: torch.Tensor, rows: int) -> torch.Tensor:
    """The first row, so many times."""
    return leaf[:1].expand(rows, *leaf.shape[1:])


def _require_rows(change: ChangeSet, run: Run, edits: Edits) -> None:
    refuse(not _gives_rows(run), "not every tensor that the model returns or keeps has a row of each input")


@fix("pad-rows", "ALN003")
def pad_rows(context: Context) -> Found:
    """Fills up the batch of a model whose products have the batch as a contiguous dimension.

    Rows are contiguous where the weight is the first factor, ``weight @ x``: then an odd batch keeps the
    product off the fast kernels. The model's one input is filled up with copies of its first row, and the
    rows of the output that were added are cut off, so that their gradients are zero. That is the same
    function only where rows do not see each other; the proof finds out: it fails for batch normalization in
    training, and for a loss inside the model.

    Refused: models with dropout, which would draw other random numbers from the same seed; models with
    several tensors as inputs, where it is not plain which are batched; models that also return what is not
    batched, which might have as many rows some day.
    """
    batch = context.step.batch
    multiples = set()
    for entry in context.step.ops:
        which = contiguous_rows(entry)
        size = getattr(entry.op, which) if which else 0
        if batch and size and size % batch == 0 and is_misaligned(size, entry.op.dtype):
            access = elements_per_access(entry.op.dtype)
            multiples.add(access // gcd(access, size // batch))
    if not multiples:
        return
    inputs = list(tensors(context.run.inputs))
    random = [e for e in context.step.ops if any(word in e.name for word in _RANDOM)]
    if random:
        name = random[0].name.removeprefix("aten.")
        yield Refusal((random[0].site.module,), f"{name} draws other random numbers for another batch")
    elif len(inputs) != 1:
        yield Refusal(("",), f"the model takes {len(inputs)} tensors, and not all of them need be batched")
    else:
        rows = max(multiples)
        words = f"Fill the batch up to a multiple of {rows} inside the model, and cut the result."
        yield ChangeSet.giving(("",), InWholeMultiples(rows), words, also=_require_rows)


def _gives_rows(run: Run) -> bool:
    """Whether all that a model returns has as many rows as its input, whatever their number, and keeps none
    in an attribute."""
    trial = run.on_meta()
    with restored(trial.model) as is_kept, torch.no_grad():
        for rows, mode in product((3, 5), (True, False)):
            made = tree_map_only(torch.Tensor, partial(_of_rows, rows=rows), trial.inputs)
            made = tree_map_only(torch.Tensor, torch.clone, made)
            try:
                result = call(trial.model.train(mode), made)
            except Exception:  # noqa: BLE001 - whatever it is, the model cannot be asked
                return False
            if any(leaf.dim() and leaf.shape[0] != rows for leaf in tensors(result)):
                return False
        return is_kept()
