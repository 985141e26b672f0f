"""Merge linear layers that read the same input into one product."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

from tilefit.cost import estimate
from tilefit.fixes.fix import Candidate, Context, Fix, Refusal, RefusedError, Undo
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
    """

    merged: Merged

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return self.merged.output(self, input)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, merged with {len(self.merged.members) - 1} siblings"


class Merged:
    """Sibling layers, and what the one that was called first has computed for the others.

    Args:
        members: The layers, of one number of inputs.
        least_rows: With fewer rows than this each layer computes its own product.
    """

    def __init__(self, members: Sequence[MergedLinear], least_rows: int) -> None:
        self.members = tuple(members)
        self.least_rows = least_rows
        self._forget()

    def _forget(self) -> None:
        self._input: torch.Tensor | None = None
        self._state: Any = None
        self._outputs: list[torch.Tensor | None] = []

    def __getstate__(self) -> dict[str, Any]:
        kept: dict[str, Any] = {"_input": None, "_state": None, "_outputs": []}
        return {**self.__dict__, **kept}

    def output(self, member: MergedLinear, x: torch.Tensor) -> torch.Tensor:
        """What ``member`` makes of ``x``."""
        if not self._fits(x):
            return F.linear(x, member.weight, member.bias)
        index = next(i for i, other in enumerate(self.members) if other is member)
        state = (x._version, torch.is_grad_enabled(), working_dtype(x))
        if x is not self._input or state != self._state or self._outputs[index] is None:
            self._input, self._state, self._outputs = x, state, list(self._products(x))
        output = self._outputs[index]
        self._outputs[index] = None
        if all(other is None for other in self._outputs):
            self._forget()
        assert output is not None
        return output

    def _fits(self, x: torch.Tensor) -> bool:
        """Whether merging pays and is safe: one must be able to see that ``x`` was written to, and all
        weights must be there (not sharded)."""
        first = self.members[0]
        return (
            not torch.compiler.is_compiling()
            and x.numel() >= self.least_rows * first.in_features
            and not x.is_inference()
            and all(
                m.weight.shape == (m.out_features, m.in_features)
                and m.weight.dtype == first.weight.dtype
                and m.weight.device == first.weight.device
                for m in self.members
            )
        )

    def _products(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = [m.out_features for m in self.members]
        dtype = working_dtype(x)
        weight = _Stacked.apply(dtype, sizes, *(m.weight for m in self.members))  # type: ignore[no-untyped-call]
        bias = None
        if any(m.bias is not None for m in self.members):
            biases = [
                m.bias if m.bias is not None else m.weight.new_zeros(m.out_features) for m in self.members
            ]
            bias = _Stacked.apply(dtype, sizes, *biases)  # type: ignore[no-untyped-call]
        return _Parts.apply(sizes, F.linear(x, weight, bias))  # type: ignore[no-untyped-call, no-any-return]


class _Stacked(Function):
    """Tensors [n_i, ...] one below the other, in another element type: cast and copied at once."""

    @staticmethod
    def forward(dtype: torch.dtype, sizes: list[int], *tensors: torch.Tensor) -> torch.Tensor:
        out = tensors[0].new_empty((sum(sizes), *tensors[0].shape[1:]), dtype=dtype)
        for part, tensor in zip(torch.split(out, sizes), tensors, strict=True):
            part.copy_(tensor)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.sizes, ctx.dtype = inputs[1], inputs[2].dtype

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, None, *torch.split(gradient.to(ctx.dtype), ctx.sizes)


class _Parts(Function):
    """The columns of a product that belong to each layer, as tensors of their own that may be changed in
    place (one memory, but no views of each other to autograd)."""

    @staticmethod
    def forward(sizes: list[int], product: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part.data for part in torch.split(product, sizes, dim=-1))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.sizes = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, torch.cat(gradients, dim=-1)


@dataclass(frozen=True)
class Merging(Candidate):
    """Groups of sibling layers, each group to become one product.

    Attributes:
        groups: Paths of the layers of each group.
        least_rows: As in :class:`Merged`.
    """

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

    def apply(self, run: Run) -> Undo:
        for path in self.modules:
            require_plain(submodule(run.model, path), path, nn.Linear)
        undos: list[Undo] = []
        for group in self.groups:
            members: Any = [submodule(run.model, path) for path in group]
            merged = Merged(members, self.least_rows)
            undos += [swap(member, MergedLinear, merged=merged) for member in members]

        def undo() -> None:
            for take_back in undos:
                take_back()

        return undo


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

    RefusedError: layers that are no plain ``nn.Linear``.
    """

    name = "merge-projections"
    rules = ("INT004",)

    def find(self, context: Context) -> Iterable[Candidate | Refusal]:
        if context.run.compiled:
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
