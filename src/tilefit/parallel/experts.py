"""Expert parallelism: ranks that share the experts of each layer and send each other the tokens for them.

What experts are is inferred from what a layer has: a parameter that scores as many ways as there are of
something else, be that matrices in a stack (grouped or batched products) or numbered modules of equal sizes
(a loop). Every rank is taken to send each expert as many tokens: a balanced router's work.

Source: Lepikhin and others, "GShard: Scaling Giant Models with Conditional Computation and Automatic
Sharding", 2020, section 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from tilefit.ops import BACKWARD_WEIGHT, FORWARD, OPTIMIZER, Collective, Gemm, Step, StepOp, Streaming
from tilefit.ops.collective import ALL_TO_ALL
from tilefit.ops.dtypes import size_bytes
from tilefit.ops.entries import Parameter, TensorRef
from tilefit.parallel.pipeline import layer_of

_NUMBER = re.compile(r"\.(\d+)(?=\.)")


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer.

    Attributes:
        count: How many.
        root: The module that has them: that of the stacks, or the list.
        names: Their parameters, each with which expert it belongs to; None: to all, as a stack.
    """

    count: int
    root: str
    names: Mapping[str, int | None]

    def of(self, entry: StepOp) -> int | None:
        """Which expert an operation is part of; of a grouped product 0; None: of none."""
        module, op = entry.site.module, entry.op
        if None in self.names.values():
            inside = module == self.root or module.startswith(f"{self.root}.")
            return 0 if inside and isinstance(op, Gemm) and op.batch == self.count else None
        match = _NUMBER.match(f"{module.removeprefix(self.root)}.") if module.startswith(self.root) else None
        return int(match[1]) if match else None


def experts_of(step: Step, prefix: str) -> list[Experts]:
    """The experts of each layer of the list ``prefix``."""
    stacked = {
        entry.parameter
        for entry in step.ops
        if isinstance(entry.op, Gemm) and entry.op.batch > 1 and _is_stack(step, entry)
    }
    multiplied = {e.parameter for e in step.ops if isinstance(e.op, Gemm) and e.op.batch == 1}
    routers = {name: step.parameters[name].shape for name in multiplied if name in step.parameters}
    found: dict[str, Experts] = {}
    for name in stacked:
        root, count = name.rpartition(".")[0], step.parameters[name].shape[0]
        own = {
            other: None
            for other, parameter in step.parameters.items()
            if other.rpartition(".")[0] == root and parameter.shape[:1] == (count,) and other not in routers
        }
        found[root] = Experts(count, root, own)
    found |= {each.root: each for each in _listed(step, prefix)}
    return [
        each
        for root, each in found.items()
        if layer_of(prefix, root) is not None and _routed(each, routers) and each.count > 1
    ]


def _is_stack(step: Step, entry: StepOp) -> bool:
    parameter = step.parameters.get(entry.parameter)
    assert isinstance(entry.op, Gemm)
    return parameter is not None and len(parameter.shape) == 3 and parameter.shape[0] == entry.op.batch


def _routed(experts: Experts, routers: dict[str, tuple[int, ...]]) -> bool:
    beside = f"{experts.root.rpartition('.')[0]}."
    return any(
        name.startswith(beside) and name not in experts.names and len(shape) == 2 and experts.count in shape
        for name, shape in routers.items()
    )


def _listed(step: Step, prefix: str) -> Iterator[Experts]:
    """Lists of modules whose parameters have equal sizes."""
    lists: dict[str, dict[int, dict[str, tuple[int, ...]]]] = {}
    for name, parameter in step.parameters.items():
        for match in _NUMBER.finditer(name):
            root = name[: match.start()]
            if root != prefix and root.startswith(prefix):
                modules = lists.setdefault(root, {})
                modules.setdefault(int(match[1]), {})[name[match.end() + 1 :]] = parameter.shape
    for root, modules in lists.items():
        if all(each == modules.get(0) for each in modules.values()):
            names = {f"{root}.{number}.{name}": number for number, each in modules.items() for name in each}
            yield Experts(len(modules), root, names)


def expert_parallel(
    step: Step, found: list[Experts], ranks: int, sharing: int = 1, imbalance: float = 1.0
) -> tuple[Step, set[int]]:
    """One rank's part of a step whose experts ``ranks`` share.

    Products have the tokens of all ranks for a share of the experts. Two all-to-alls lie around them in each
    direction, and beside each what sorts the tokens by expert again, where a rank has several.

    Args:
        step: A step as captured: not fused.
        found: Its experts, by :func:`experts_of`.
        ranks: How many share them; 1: none.
        sharing: Tensor-parallel ranks that share the tokens.
        imbalance: Tokens of the fullest rank over the mean.

    Returns:
        The step, and which of its operations are of experts.
    """
    factor = ranks / sharing * (imbalance if ranks > 1 else 1.0)
    parts = [_Part(step, each, ranks, sharing, factor) for each in found]
    ops: list[StepOp] = []
    own: set[int] = set()
    for index, entry in enumerate(step.ops):
        part = next((each for each in parts if index in each.members), None)
        if part is None:
            ops.append(entry)
            continue
        ops += part.sent(index) if index in part.firsts else ()
        mine = part.own(index)
        own.update(range(len(ops), len(ops) + len(mine)))
        ops += mine
        ops += part.sent(index) if index in part.lasts else ()
    parameters = dict(step.parameters)
    for each in parts:
        each.divide(parameters)
    total = sum(prod(p.shape) for p in step.parameters.values() if p.trainable)
    owned = sum(prod(p.shape) for p in parameters.values() if p.trainable) / total if total else 1.0
    ops = [entry.shared(owned) if entry.phase == OPTIMIZER else entry for entry in ops]
    return replace(step, ops=tuple(ops), parameters=parameters), own


class _Part:
    """What a rank does of the experts of a layer."""

    def __init__(self, step: Step, experts: Experts, ranks: int, sharing: int, factor: float) -> None:
        self._step, self._experts, self._ranks = step, experts, ranks
        self._sharing, self._factor = sharing, factor
        self._is_stack = None in experts.names.values()
        self.members = {
            index: number
            for index, entry in enumerate(step.ops)
            if entry.phase != OPTIMIZER and (number := experts.of(entry)) is not None
        }
        ways = [[i for i in self.members if (step.ops[i].phase == FORWARD) == way] for way in (True, False)]
        self.firsts = {way[0] for way in ways if way}
        self.lasts = {way[-1] for way in ways if way}
        products = [(self.members[i], op) for i in ways[0] if isinstance(op := step.ops[i].op, Gemm)]
        into, out_of = dict(reversed(products)).values(), dict(products).values()
        self._dtype = products[0][1].dtype if products else "bf16"
        #: Elements that all experts read and write.
        self._sizes = sum(op.m * op.k * op.batch for op in into), sum(op.m * op.n * op.batch for op in out_of)

    def sent(self, index: int) -> list[StepOp]:
        """Tokens, or their gradients, as ranks send them to each other at the first or last operation."""
        if self._ranks == 1:
            return []
        phase, site = self._step.ops[index].phase, self._step.ops[index].site
        size = self._sizes[(index in self.lasts) == (phase == FORWARD)] * self._factor / self._ranks
        op = Collective(ALL_TO_ALL, max(1, round(size)), self._ranks, self._dtype)
        ref = TensorRef(-1 - index, (op.elements,), self._dtype)
        made = [StepOp(op, phase, site, ALL_TO_ALL, (), (ref,))]
        if self._experts.count > self._ranks:
            elements = op.elements * self._sharing  # what ranks share is divided later
            moved = elements * int(size_bytes(self._dtype))
            made.append(StepOp(Streaming("copy", elements, moved, moved), phase, site, "copy"))
        return made if index in self.firsts else made[::-1]

    def own(self, index: int) -> list[StepOp]:
        """An operation as the rank runs it; none where its expert is another rank's."""
        entry, mine = self._step.ops[index], self._experts.count // self._ranks
        if self._is_stack:
            return [replace(entry, op=replace(self._resized(entry), batch=mine))]
        if self.members[index] >= mine:
            return []
        grown = self._factor * self._sharing
        op = self._resized(entry) if isinstance(entry.op, Gemm) else entry.op.shared(grown)
        if entry.phase == BACKWARD_WEIGHT:
            return [replace(entry, op=op)]
        inputs, outputs = (
            tuple(_grown(ref, grown) for ref in refs) for refs in (entry.inputs, entry.outputs)
        )
        return [replace(entry, op=op, inputs=inputs, outputs=outputs)]

    def _resized(self, entry: StepOp) -> Gemm:
        """A product with the tokens that the rank has for it."""
        op = entry.op
        assert isinstance(op, Gemm)
        weights = self._step.parameters.get(entry.parameter)
        by_rows = weights is None or sorted((op.n, op.k)) == sorted(weights.shape[-2:])
        tokens = "k" if entry.phase == BACKWARD_WEIGHT else "m" if by_rows else "n"
        return replace(op, **{tokens: max(1, round(getattr(op, tokens) * self._factor))})

    def divide(self, parameters: dict[str, Parameter]) -> None:
        """Leave a rank's share of the parameters."""
        mine = self._experts.count // self._ranks
        for name, number in self._experts.names.items():
            if number is None:
                whole = parameters[name]
                parameters[name] = replace(whole, shape=(mine, *whole.shape[1:]))
            elif number >= mine:
                del parameters[name]


def _grown(ref: TensorRef, factor: float) -> TensorRef:
    if ref.parameter or not ref.shape:
        return ref
    return replace(ref, shape=(max(1, round(ref.shape[0] * factor)), *ref.shape[1:]))
