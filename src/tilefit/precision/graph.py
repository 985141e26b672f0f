"""What the autograd graph says about a loss: what scaled it, how it was reduced, in which precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import Any

import torch

from tilefit.precision.gradients import Mark
from tilefit.precision.tensors import HALF

#: Key in a node's metadata under which the ledger leaves its mark.
MARK = "tilefit_scale"

#: Operations on scalars that only pass a loss on.
_PASS = tuple(
    f"{name}Backward"
    for name in "Add Sub Mul Div Neg ToCopy Clone View Squeeze Unsqueeze ReshapeAlias Alias".split()
)
#: Losses, which have a reduction argument.
_LOSSES = tuple(
    f"{name}Backward"
    for name in """NllLoss NllLoss2D MseLoss L1Loss SmoothL1Loss HuberLoss BinaryCrossEntropy
    BinaryCrossEntropyWithLogits KlDiv""".split()
)
_REDUCTION_MEAN = 1
#: Where losses end whose gradient may be anything: products with a tensor, and Functions.
_PRODUCTS = ("DotBackward", "MulBackward", "MvBackward", "MmBackward", "BmmBackward", "CompiledFunction")
#: Nodes that are followed from a root: losses are put together from few scalars.
_LONGEST = 32


@dataclass(slots=True)
class Chain:
    """The scalar operations between the root of a backward pass and the reductions that feed it.

    Attributes:
        marks: Marks of the scales met on the way.
        plain: Branches that no scale was met on.
        half: The first scalar computed in half precision: its operation, element type and sequence number.
        factor: Product of the constants the loss is multiplied by, on its only branch; None where there are
            several branches or a factor is a tensor on a device.
        mean: Every branch ends in a mean.
        clean: No branch ends in a product with a tensor that may have brought a scale along.
    """

    marks: set[Mark] = field(default_factory=set)
    plain: int = 0
    half: tuple[str, torch.dtype, int] | None = None
    factor: float | None = 1.0
    mean: bool = True
    clean: bool = True


def chain(roots: Iterable[torch.Tensor]) -> Chain:
    """Follow the scalars from the roots of a backward pass down to where they were reduced."""
    found = Chain()
    todo = [(node, False) for node in starts(roots)]
    branches = len(todo)
    for _ in range(_LONGEST):
        if not todo:
            break
        node, scaled = todo.pop()
        name = node.name()
        mark = node.metadata.get(MARK)
        if mark is not None:
            found.marks.add(mark)
            scaled = True
        metadata = _metadata(node)
        if metadata is None or prod(metadata.shape) != 1:
            found.plain += not scaled
            found.mean = False
            continue
        if found.half is None and metadata.dtype in HALF:
            found.half = (name, metadata.dtype, node._sequence_nr())
        follow = [child for child, _ in node.next_functions if child is not None]
        if not name.startswith(_PASS):
            found.plain += not scaled
            found.mean &= _is_mean(node, name)
            found.clean &= not any(map(_may_scale, (node, *follow)))
            continue
        if mark is None and name.startswith(("MulBackward", "DivBackward")):
            found.factor = _multiplied(found.factor, node, name)
        branches += len(follow) - 1
        todo += [(child, scaled) for child in follow]
    found.plain += sum(not scaled for _, scaled in todo)
    if branches != 1:
        found.factor = None
    return found


#: Nodes of one graph that are gone through. PyTorch frees a chain of nodes that Python has seen one inside
#: another, and the stack overflows where they are some tens of thousands (seen with 50,000 and 8 MiB).
MOST = 10_000

#: Of a node, its name and the element type of the gradient it is given, None where that is not known.
Kind = tuple[str, torch.dtype | None]
Visit = Callable[[Any, Kind], object]


@dataclass(slots=True)
class Scan:
    """How many nodes of each kind are below the roots of a backward pass, and the leaves found there; whether
    these are the ``whole`` graph's."""

    nodes: Counter[Kind] = field(default_factory=Counter)
    leaves: list[torch.Tensor] = field(default_factory=list)
    whole: bool = True

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Element types of the gradients that flow there."""
        return {dtype for _, dtype in self.nodes if dtype is not None}

    @property
    def compiled(self) -> bool:
        """A part of it is a compiled graph."""
        return any(name.startswith("CompiledFunction") for name, _ in self.nodes)


def scan(
    roots: Iterable[Any], inputs: Sequence[Any] = (), limit: int = 400, visit: Visit = lambda node, kind: None
) -> Scan:
    """Look at the first ``limit`` nodes below the roots of a backward pass to inputs, and visit each."""
    found = Scan()
    for node, kind in islice(nodes(roots, inputs), limit):
        found.nodes[kind] += 1
        if kind[0].endswith("AccumulateGrad"):
            found.leaves.append(node.variable)
        visit(node, kind)
    found.whole = found.nodes.total() < limit
    return found


def nodes(roots: Iterable[Any], inputs: Sequence[Any] = ()) -> Iterator[tuple[Any, Kind]]:
    """The nodes below the roots of a backward pass, and their kinds.

    Args:
        roots: Where it starts: tensors or gradient edges.
        inputs: Where it ends, none for everywhere. What is older than all of them, as their operations'
            numbers say, leads to none of them and is left out.
    """
    ends = starts(inputs)
    # Without a node of its own an input is a parameter or the like, which may be the oldest of all.
    oldest = min(node._sequence_nr() for node in ends) if ends and len(ends) == len(inputs) else -1
    todo = starts(roots)
    seen = set(todo)
    while todo:
        node = todo.pop()
        metadata = _metadata(node)
        yield node, (node.name(), None if metadata is None else metadata.dtype)
        for child, _ in node.next_functions:
            if child is not None and child not in seen and child._sequence_nr() > oldest:
                seen.add(child)
                todo.append(child)


def starts(roots: Iterable[Any]) -> list[Any]:
    """The nodes that a backward pass starts from."""
    # A tensor may have an attribute of the user's that is called as an edge's is.
    nodes = [getattr(root, "grad_fn" if isinstance(root, torch.Tensor) else "node", None) for root in roots]
    return [node for node in nodes if node is not None]


def _metadata(node: Any) -> Any:
    inputs = getattr(node, "_input_metadata", None)
    return inputs[0] if inputs else None


def _is_mean(node: Any, name: str) -> bool:
    return name.startswith("MeanBackward") or (
        name.startswith(_LOSSES) and getattr(node, "_saved_reduction", None) == _REDUCTION_MEAN
    )


def _may_scale(node: Any) -> bool:
    """Whether what a loss is made of was multiplied by a tensor that no graph leads to, or by a Function."""
    name = node.name()
    if getattr(node, "_forward_cls", None) is not None:
        return True
    return name.startswith(_PRODUCTS) and any(child is None for child, _ in node.next_functions)


def _multiplied(factor: float | None, node: Any, name: str) -> float | None:
    """The factor times what this node multiplies by; None where that cannot be read without waiting."""
    # A number that was wrapped as a tensor cannot be read under a dispatch mode.
    with torch._C._DisableTorchDispatch():
        saved = getattr(node, "_saved_other", None)
        other = getattr(node, "_saved_self", None) if saved is None else saved
        if factor is None or other is None:
            return None
        if isinstance(other, torch.Tensor):
            if other.device.type != "cpu" or other.numel() != 1:
                return None
            other = float(other)
    if name.startswith("DivBackward"):
        return factor / other if other else None
    return factor * other
