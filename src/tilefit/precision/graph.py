"""What the autograd graph says about a loss: what scaled it, how it was reduced, in which precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import Any

import torch

#: Key in a node's metadata under which the ledger leaves its mark.
MARK = "tilefit_scale"

#: Operations on scalars that only pass a loss on.
_PASS = (
    "AddBackward",
    "SubBackward",
    "MulBackward",
    "DivBackward",
    "NegBackward",
    "ToCopyBackward",
    "CloneBackward",
    "ViewBackward",
    "SqueezeBackward",
    "UnsqueezeBackward",
    "ReshapeAliasBackward",
    "AliasBackward",
)
#: Reductions that divide by the number of elements; the losses among them have a reduction argument.
_MEANS = ("MeanBackward",)
_LOSSES = (
    "NllLossBackward",
    "NllLoss2DBackward",
    "MseLossBackward",
    "L1LossBackward",
    "SmoothL1LossBackward",
    "HuberLossBackward",
    "BinaryCrossEntropyBackward",
    "BinaryCrossEntropyWithLogitsBackward",
    "KlDivBackward",
)
_REDUCTION_MEAN = 1
_HALF = (torch.float16, torch.bfloat16)
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
    """

    marks: set[tuple[int, int]] = field(default_factory=set)
    plain: int = 0
    half: tuple[str, str, int] | None = None
    factor: float | None = 1.0
    mean: bool = True


def chain(roots: Iterable[torch.Tensor]) -> Chain:
    """Follow the scalars from the roots of a backward pass down to where they were reduced."""
    found = Chain()
    todo = [(node, False) for node in _starts(roots)]
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
        if found.half is None and metadata.dtype in _HALF:
            found.half = (name, str(metadata.dtype), node._sequence_nr())
        follow = [child for child, _ in node.next_functions if child is not None]
        if not name.startswith(_PASS):
            found.plain += not scaled
            found.mean &= _is_mean(node, name)
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


@dataclass(slots=True)
class Scan:
    """What is below the roots of a backward pass.

    Attributes:
        nodes: How many nodes there are of each kind.
    """

    nodes: Counter[Kind] = field(default_factory=Counter)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Element types of the gradients that flow there."""
        return {dtype for _, dtype in self.nodes if dtype is not None}

    @property
    def compiled(self) -> bool:
        """A part of it is a compiled graph."""
        return any(name.startswith("CompiledFunction") for name, _ in self.nodes)


def scan(roots: Iterable[Any], limit: int = 400) -> Scan:
    """Look at the first ``limit`` nodes below the roots of a backward pass."""
    return Scan(Counter(kind for _, kind in islice(nodes(roots), limit)))


def nodes(roots: Iterable[Any], inputs: Sequence[Any] = ()) -> Iterator[tuple[Any, Kind]]:
    """The nodes below the roots of a backward pass, and their kinds.

    Args:
        roots: Where it starts: tensors or gradient edges.
        inputs: Where it ends, none for everywhere. What is older than all of them, as their operations'
            numbers say, leads to none of them and is left out.
    """
    ends = _starts(inputs)
    # Without a node of its own an input is a parameter or the like, which may be the oldest of all.
    oldest = min(node._sequence_nr() for node in ends) if ends and len(ends) == len(inputs) else -1
    todo = _starts(roots)
    seen = set(todo)
    while todo:
        node = todo.pop()
        metadata = _metadata(node)
        yield node, (node.name(), None if metadata is None else metadata.dtype)
        for child, _ in node.next_functions:
            if child is not None and child not in seen and child._sequence_nr() > oldest:
                seen.add(child)
                todo.append(child)


def _starts(roots: Iterable[Any]) -> list[Any]:
    """The nodes that a backward pass starts from."""
    # A tensor may have an attribute of the user's that is called as an edge's is.
    nodes = [getattr(root, "grad_fn" if isinstance(root, torch.Tensor) else "node", None) for root in roots]
    return [node for node in nodes if node is not None]


def _metadata(node: Any) -> Any:
    inputs = getattr(node, "_input_metadata", None)
    return inputs[0] if inputs else None


def _is_mean(node: Any, name: str) -> bool:
    return name.startswith(_MEANS) or (
        name.startswith(_LOSSES) and getattr(node, "_saved_reduction", None) == _REDUCTION_MEAN
    )


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
    return factor / other if name.startswith("DivBackward") else factor * other
