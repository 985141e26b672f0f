"""Merge linear layers that read the same input into one product."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from tilefit.cost import estimate
from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal, RefusedError
from tilefit.fixes.padding import working_dtype
from tilefit.fixes.run import Run
from tilefit.fixes.swap import require_plain, submodule, swap
from tilefit.ops import Gemm, Streaming
from tilefit.ops.dtypes import size_bytes
from tilefit.rules.flow import Flow, LinearCall, parent
from tilefit.rules.intensity.parallel_projections import groups
from tilefit.rules.sites import pattern


class MergedLinear(nn.Linear):
    """A linear layer whose product is computed together with its siblings'.

    Attributes:
        merged: What the siblings share.
        index: Which of them this one is.
    """

    merged: Merged
    index: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return self.merged.output(self, input)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, merged with {len(self.merged.members) - 1} siblings"


class Merged:
    """Sibling layers, and what the one that was called first has computed for the others.

    What the merging saves is worth little where the host is what a step waits for, so that every call here
    counts: PyTorch's own functions throughout, and no more checks than a changed state needs.

    Args:
        members: The layers, of one number of inputs.
        least_rows: With fewer rows than this each layer computes its own product.
    """

    def __init__(self, members: Sequence[MergedLinear], least_rows: int) -> None:
        self.members = tuple(members)
        self.least_rows = least_rows
        self.sizes = [member.out_features for member in members]
        self.shapes = [(member.out_features, member.in_features) for member in members]
        self.has_bias = any(member.bias is not None for member in members)
        self._forget()

    def _forget(self) -> None:
        self._input: torch.Tensor | None = None
        self._state: Any = None
        self._outputs: list[torch.Tensor | None] = []
        self._waiting = 0

    def __getstate__(self) -> dict[str, Any]:
        kept: dict[str, Any] = {"_input": None, "_state": None, "_outputs": [], "_waiting": 0}
        return {**self.__dict__, **kept}

    def output(self, member: MergedLinear, x: torch.Tensor) -> torch.Tensor:
        """What ``member`` makes of ``x``."""
        # In inference mode nobody can tell whether the input was written to.
        if (
            torch.compiler.is_compiling()
            or x.numel() < self.least_rows * member.in_features
            or x.is_inference()
        ):
            return F.linear(x, member.weight, member.bias)
        state = x._version, torch.is_grad_enabled(), working_dtype(x)
        if x is self._input and state == self._state:
            output = self._outputs[member.index]
            if output is not None:
                self._outputs[member.index] = None
                self._waiting -= 1
                if not self._waiting:
                    self._forget()
                return output
        outputs = self._products(x)
        if outputs is None:
            return F.linear(x, member.weight, member.bias)
        self._input, self._state, self._outputs = x, state, list(outputs)
        self._outputs[member.index] = None
        self._waiting = len(outputs) - 1
        return outputs[member.index]

    def _products(self, x: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """What all members make of ``x``; None where their weights are sharded, or not alike."""
        weights = [member.weight for member in self.members]
        first = weights[0]
        for weight, shape in zip(weights, self.shapes, strict=True):
            if weight.shape != shape or weight.dtype != first.dtype or weight.device != first.device:
                return None
        bias = torch.cat([self._bias(member) for member in self.members]) if self.has_bias else None
        product = F.linear(x, torch.cat(weights), bias)
        # No views of each other to autograd: each may be changed in place.
        return torch.unsafe_split_with_sizes(product, self.sizes, -1)

    @staticmethod
    def _bias(member: MergedLinear) -> torch.Tensor:
        bias = member.bias
        return member.weight.new_zeros(member.out_features) if bias is None else bias


@dataclass(frozen=True)
class Merging(ChangeSet):
    """Groups of sibling layers, each group to become one product.

    Attributes:
        groups: Paths of the layers of each group.
        least_rows: As in :class:`Merged`.
    """

    saves_launches: ClassVar[bool] = False

    groups: tuple[tuple[str, ...], ...]
    least_rows: int

    @property
    def summary(self) -> str:
        names = ", ".join(path.rpartition(".")[2] for path in self.groups[0])
        where = pattern(list(self.scopes)) if any(self.scopes) else "the model"
        return f"Compute {names} in {where} as one product."

    @property
    def scopes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(parent(group[0]) for group in self.groups))

    def make(self, run: Run, edits: Edits) -> None:
        for path in self.modules:
            require_plain(submodule(run.model, path), path, nn.Linear)
        for group in self.groups:
            members: Any = [submodule(run.model, path) for path in group]
            merged = Merged(members, self.least_rows)
            for index, member in enumerate(members):
                swap(edits, member, MergedLinear, merged=merged, index=index)


class MergeProjections(Fix):
    """Computes the query, key and value projections of attention, and their like, as one product.

    The layer that is called first multiplies its input by the weights of all its siblings; they find their
    part of the result when they are called with the same tensor. The weights are stacked on the way (under
    autocast they are copied anyway, to be cast), so that the layers, their parameters and names stay. The
    input is cast and read once; its gradient is one product instead of several that are added up.

    The same function: each output is the same sum of products. With another input, with one that was written
    to in between, and with too few rows for the copy of the weights to pay (generating text), each layer
    computes its own product; so it does under ``torch.compile`` and in inference mode, where nobody can tell
    whether the input was written to.

    Refused: layers that are no plain ``nn.Linear``.
    """

    name = "merge-projections"
    rules = ("INT004",)

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        if context.run.options.compile:
            return
        alike: dict[Any, list[list[LinearCall]]] = defaultdict(list)
        for calls in groups(Flow(context.step)):
            paths = tuple(call.layer.module for call in calls)
            try:
                for path in paths:
                    require_plain(submodule(context.run.model, path), path, nn.Linear)
            except RefusedError as refused:
                yield Refusal(paths, refused.what)
                continue
            names = tuple(path.rpartition(".")[2] for path in paths)
            alike[names, tuple(_product(context, call) for call in calls)].append(calls)
        for found in alike.values():
            together = dict.fromkeys(tuple(call.layer.module for call in calls) for calls in found)
            modules = tuple(dict.fromkeys(path for group in together for path in group))
            if len(modules) == sum(map(len, together)):  # no layer in two groups
                yield Merging(modules, tuple(together), _least_rows(context, found[0]))


def _product(context: Context, call: LinearCall) -> Gemm:
    op = context.step.ops[call.forward].op
    assert isinstance(op, Gemm)
    return op


def _least_rows(context: Context, calls: Sequence[LinearCall]) -> int:
    """The fewest rows (a power of two, or those of the step) with which the merged forward product pays."""
    products = [_product(context, call) for call in calls]
    merged = replace(products[0], n=sum(op.n for op in products), ld_a=0, ld_b=0)
    size = merged.n * merged.k
    width = size_bytes(merged.dtype)
    stack_s = estimate(Streaming("copy", size, size * width, size * width, merged.dtype), context.gpu).time_s

    def pays(rows: int) -> bool:
        apart_s = sum(estimate(replace(op, m=rows), context.gpu).time_s for op in products)
        return estimate(replace(merged, m=rows), context.gpu).time_s + stack_s < apart_s

    rows = 1
    while rows < merged.m and not pays(rows):
        rows *= 2
    return min(rows, merged.m)
