"""Pad the batch of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tilefit.capture.forward import call
from tilefit.capture.trees import tensors
from tilefit.fixes.assumed import Assumed
from tilefit.fixes.behaviour import Behaviour
from tilefit.fixes.calls import is_transformed
from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal, RefusedError
from tilefit.fixes.interior import is_watched_within
from tilefit.fixes.modules import behave
from tilefit.fixes.run import Run
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

        def fill(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return torch.cat([leaf, leaf[:1].expand(more, *leaf.shape[1:])])

        def cut(leaf: Any) -> Any:
            is_padded = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == rows + more
            return leaf[:rows] if is_padded else leaf

        args, kwargs = tree_map(fill, (args, kwargs))
        return tree_map(cut, forward(*args, **kwargs))


@dataclass(frozen=True)
class RowPadding(ChangeSet):
    """A model whose batch is filled up.

    Attributes:
        multiple: To a multiple of this.
    """

    multiple: int

    words = "Fill the batch up to a multiple of {0.multiple} inside the model, and cut the result."

    def make(self, run: Run, edits: Edits) -> None:
        if not _gives_rows(run):
            raise RefusedError("not every tensor that the model returns or keeps has a row of each input")
        behave(run, edits, self.modules, InWholeMultiples(self.multiple))


class PadRows(Fix):
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

    name = "pad-rows"
    rules = ("ALN003",)

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
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
            yield Refusal(
                ("",), f"the model takes {len(inputs)} tensors, and not all of them need be batched"
            )
        else:
            yield RowPadding(("",), max(multiples))


def _gives_rows(run: Run) -> bool:
    """Whether all that a model returns has as many rows as its input, whatever their number, and keeps none
    in an attribute."""
    trial = run.on_meta()
    kept = [(part, Assumed.of(part)) for part in trial.model.modules()]
    inputs = next(tensors(trial.inputs), None)
    if inputs is None:
        return False
    for rows in (3, 5):
        for mode in (True, False):
            few = inputs[:1].expand(rows, *inputs.shape[1:]).contiguous()
            made = tree_map(
                lambda leaf, few=few: few if isinstance(leaf, torch.Tensor) else leaf, trial.inputs
            )
            try:
                with torch.no_grad():
                    result = call(trial.model.train(mode), made)
            except Exception:  # noqa: BLE001 - whatever it is, the model cannot be asked
                return False
            if any(leaf.dim() and leaf.shape[0] != rows for leaf in tensors(result)):
                return False
    return all(assumed.holds(part) for part, assumed in kept)
