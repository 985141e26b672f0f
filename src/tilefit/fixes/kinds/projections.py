"""Merge linear layers that read the same input into one product."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from tilefit.cost import estimate
from tilefit.fixes.changes.behaviour import Behaviour
from tilefit.fixes.changes.calls import as_rows, linear_dtype
from tilefit.fixes.changes.edits import Edits
from tilefit.fixes.changes.fix import ChangeSet, Context, Found, Refusal, RefusedError, fix, in_words
from tilefit.fixes.changes.modules import caller, fewest_rows, require_alone, state_of, submodule
from tilefit.fixes.changes.region import Region
from tilefit.fixes.changes.run import Run
from tilefit.ops import Gemm, Streaming
from tilefit.ops.dtypes import size_bytes
from tilefit.rules.flow import Flow, LinearCall, linear_calls
from tilefit.rules.intensity.parallel_projections import groups

#: Host time that a group adds to a training step beside its launches: the median of what ViT, OPT, Swin,
#: BART, T5, DeBERTa, ELECTRA and ViT-MAE gained less than launches and kernels predict, where the host set
#: the pace: 0.27 to 0.64 ms at 1.2 times the stated launch times
#: (``benchmarks/results/fix_gain_slow_hosts_h200.json``).
HOST_S = 330e-6

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Merged(Behaviour):
    """A linear layer whose product is computed together with its siblings'.

    The one that is called first with a tensor, while a call of the module they belong to runs, computes all;
    the others find their part. Whatever else they are called with is each one's own product.

    Attributes:
        region: Of the module they belong to.
        members: All of them.
        index: Which of them this one is.
        least_rows: With fewer rows than this each layer computes its own product.
    """

    region: Region
    members: tuple[Any, ...]
    index: int
    least_rows: int
    is_innermost = True

    def require(self, module: nn.Module, path: str) -> None:
        require_alone(module, path)

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: torch.Tensor) -> torch.Tensor:
        space = self.region.space()
        # In inference mode nobody can tell whether the input was written to.
        dtype = None if space is None else linear_dtype(module, input)
        output = None if space is None or dtype is None else self._output(space, module, input, dtype)
        return forward(input) if output is None else output

    def _output(
        self, space: dict[Any, Any], module: nn.Module, x: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """What a layer makes of an input, if that is to be computed with its siblings'."""
        state = x._version, x.data_ptr(), torch.is_grad_enabled(), dtype
        if not (self.members in space and space[self.members][-1]):
            if not self._can_merge(x, dtype):
                return None
            states = [*map(state_of, self.members)]
            space[self.members] = x, state, states, _outputs(self.members, x.to(dtype))
        its, then, states, outputs = space[self.members]
        is_so = its is x and then == state and states[self.index] == state_of(module)
        return outputs.pop(self.index, None) if is_so else None

    def _can_merge(self, x: torch.Tensor, dtype: torch.dtype) -> bool:
        if x.numel() < self.least_rows * x.shape[-1]:
            return False
        wrapper = DistributedDataParallel._active_ddp_module
        if wrapper is not None and wrapper.find_unused_parameters:
            return False  # it looks for the layers that were called among the inputs of what was computed
        return all(
            linear_dtype(member, x) == dtype and member.weight.dtype == self.members[0].weight.dtype
            for member in self.members
        )


def _outputs(members: Sequence[Any], x: torch.Tensor) -> dict[int, torch.Tensor]:
    """The products of an input with all layers, in its element type."""
    sizes = [len(member.weight) for member in members]
    parameters = [*(member.weight for member in members), *(member.bias for member in members)]
    is_graded = any(each is not None and each.requires_grad for each in (x, *parameters))
    if is_graded and torch.is_grad_enabled():
        return dict(enumerate(_Product.apply(sizes, x, *parameters)))  # type: ignore[no-untyped-call]
    return dict(enumerate(_product(sizes, x, parameters)[0]))


def _product(sizes: list[int], x: torch.Tensor, parameters: Sequence[Any]) -> tuple[Tensors, torch.Tensor]:
    """The products with all weights, and these as one."""
    weights, biases = parameters[: len(sizes)], list(parameters[len(sizes) :])
    missing = [i for i, bias in enumerate(biases) if bias is None]
    for i in missing:
        biases[i] = weights[i].new_zeros(sizes[i])
    weight = _stacked(weights, x.dtype)
    product = F.linear(x, weight, None if len(missing) == len(sizes) else _stacked(biases, x.dtype))
    # No views of each other to autograd: each may be changed in place.
    return torch.unsafe_split_with_sizes(product, sizes, -1), weight


def _stacked(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    if tensors[0].dtype == dtype:
        return torch.cat(list(tensors))
    rows = sum(map(len, tensors))
    return torch.cat(list(tensors), out=tensors[0].new_empty(rows, *tensors[0].shape[1:], dtype=dtype))


class _Product(Function):
    """Products of x [..., k] and weights [n, k], plus biases [n] or None; x in the type they are computed in.

    Parameters of an output that nobody uses get no gradient, as if it had not been computed.
    """

    @staticmethod
    def forward(ctx: Any, sizes: list[int], x: torch.Tensor, *parameters: torch.Tensor | None) -> Tensors:
        ctx.set_materialize_grads(False)
        outputs, weight = _product(sizes, x, parameters)
        ctx.save_for_backward(x, weight)
        # Those that the gradient is differentiated by once more; the product needs them no longer.
        ctx.sizes, ctx.weights = sizes, parameters[: len(sizes)]
        ctx.left, ctx.kept = set(range(len(sizes))), None
        needs_x, *needs = ctx.needs_input_grad[1:]
        ctx.watched = needs_x and weight.dtype == ctx.weights[0].dtype
        ctx.versions = x._version, *(each._version for each in ctx.weights)
        if not needs_x:
            trained = map(any, zip(needs[: len(sizes)], needs[len(sizes) :], strict=True))
            ctx.mark_non_differentiable(*(y for y, asks in zip(outputs, trained, strict=True) if not asks))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        x, weight = ctx.kept or ctx.saved_tensors
        is_again, number = torch.is_grad_enabled(), len(ctx.sizes)
        read = (x, *ctx.weights) if ctx.watched or is_again else (x,)
        if any(each._version != version for each, version in zip(read, ctx.versions, strict=False)):
            raise RuntimeError(
                "the input or a weight was changed in place before the gradient of its product was computed"
            )
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]
        # Each layer by itself could still be differentiated when the graph of another was.
        ctx.left.difference_update(used)
        ctx.kept = (x, weight) if ctx.left else None
        if is_again or len(used) < number:
            own = [each.to(x.dtype) for each in ctx.weights] if is_again else torch.split(weight, ctx.sizes)
            weight = torch.cat([own[i] for i in used])
        gradient = torch.cat([gradients[i] for i in used], -1)  # type: ignore[misc]
        needs_x, *needs = ctx.needs_input_grad[1:]
        by_input, rows = gradient @ weight if needs_x else None, as_rows(gradient)
        found: list[torch.Tensor | None] = [None] * len(needs)
        for first, make in ((0, lambda: rows.mT @ as_rows(x)), (number, lambda: rows.sum(0))):
            if any(needs[first : first + number]):
                made = torch.split(make().to(ctx.weights[0].dtype), [ctx.sizes[i] for i in used])  # type: ignore[no-untyped-call]
                for i, each in zip(used, made, strict=True):
                    found[first + i] = each if needs[first + i] else None
        return None, by_input, *found


@dataclass(frozen=True)
class Merging(ChangeSet):
    """The change of groups of sibling layers, each to become one product.

    Attributes:
        groups: Paths of the layers of each group.
        least_rows: As in :class:`Merged`.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    least_rows: int = 0

    @classmethod
    def of(cls, groups: Sequence[tuple[str, ...]], least_rows: int, host_s: float = 0.0) -> Merging:
        """That of these groups."""
        paths = tuple(dict.fromkeys(path for group in groups for path in group))
        names = ", ".join(path.rpartition(".")[2] for path in groups[0])
        parents = in_words(dict.fromkeys(group[0].rpartition(".")[0] for group in groups))
        words = f"Compute {names} in {parents} as one product."
        return cls(paths, groups=tuple(groups), least_rows=least_rows, host_s=host_s, words=words)

    def make(self, run: Run, edits: Edits) -> None:
        regions: dict[str, Region] = {}
        for group in self.groups:
            path, members = caller(run.model, group[0]), tuple(submodule(run.model, p) for p in group)
            if path not in regions:
                regions[path] = Region()
                edits.give(submodule(run.model, path), path, regions[path])
            for index, (member, each) in enumerate(zip(members, group, strict=True)):
                edits.give(member, each, Merged(regions[path], members, index, self.least_rows))


@fix("merge-projections", "INT004")
def merge_projections(context: Context) -> Found:
    """Computes the query, key and value projections of attention, and their like, as one product.

    The layer that is called first multiplies its input by the weights of all its siblings; they find their
    part of the result when they are called with the same tensor, before the module they belong to returns.
    The weights are stacked on the way (under autocast they are copied anyway, to be cast), so that the
    layers, their parameters and names stay. The input is cast and read once; its gradient is one product
    instead of several that are added up.

    The same function: each output is the same sum of products, and a layer whose output is not used gets no
    gradient. With another input, one that was written to in between, parameters that have changed, too few
    rows for the copy of the weights to pay (generating text), or called from outside, each layer computes
    its own product; so it does under ``torch.compile`` and ``torch.func``, in inference mode, where nobody
    can tell whether the input was written to, where the layers' weights are sharded (FSDP, tensor
    parallelism), and where DDP looks for unused parameters. The outputs are not contiguous: each is a part
    of the product.

    Refused: layers that are no plain ``nn.Linear``, and those that are called with yet another input without
    their siblings, whose products with it would be computed for nobody.
    """
    if context.run.options.compile:
        return
    alike: dict[Any, list[list[LinearCall]]] = defaultdict(list)
    found_groups = [*groups(Flow(context.step))]
    together = Counter(tuple(call.layer.module for call in calls) for calls in found_groups)
    called = Counter(call.layer.module for call in linear_calls(context.step))
    for calls in found_groups:
        paths = tuple(call.layer.module for call in calls)
        try:
            for path in paths:
                require_alone(submodule(context.run.model, path), path)
            caller(context.run.model, paths[0])
        except RefusedError as refused:
            yield Refusal(paths, refused.what)
            continue
        alone = [path for path in paths if called[path] > together[paths]]
        if alone:
            yield Refusal(paths, f"{alone[0]} is also called without the others")
            continue
        names = tuple(path.rpartition(".")[2] for path in paths)
        alike[names, tuple(_product_of(context, call) for call in calls)].append(calls)
    for found in alike.values():
        merged = tuple(dict.fromkeys(tuple(call.layer.module for call in calls) for calls in found))
        rows = _least_rows(context, found[0])
        yield Merging.of(merged, rows, HOST_S * len(found))


def _product_of(context: Context, call: LinearCall) -> Gemm:
    op = context.step.ops[call.forward].op
    assert isinstance(op, Gemm)
    return op


def _least_rows(context: Context, calls: Sequence[LinearCall]) -> int:
    """The fewest rows (a power of two, or those of the step) with which the merged forward product pays."""
    products = [_product_of(context, call) for call in calls]
    merged = replace(products[0], n=sum(op.n for op in products), ld_a=0, ld_b=0)
    size = merged.n * merged.k
    width = size_bytes(merged.dtype)
    stack_s = estimate(Streaming("copy", size, size * width, size * width, merged.dtype), context.gpu).time_s

    def pays(rows: int) -> bool:
        apart_s = sum(estimate(replace(op, m=rows), context.gpu).time_s for op in products)
        return estimate(replace(merged, m=rows), context.gpu).time_s + stack_s < apart_s

    return fewest_rows(merged.m, pays)
