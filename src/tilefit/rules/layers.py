"""The linear layers of a step: the three products of each, found again among the operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Gemm, Step, StepOp, TensorRef


@dataclass(slots=True)
class Linear:
    """A product with a weight, and its two gradients.

    Attributes:
        module, source: Its site.
        parameter: Name of the weight.
        in_features, out_features: Sizes of the weight.
        dtype: Element type of the products.
        forward, backward_data, backward_weight: Indices into ``Step.ops``; several where the layer is
            called several times.
        inputs, outputs: Ids of the tensors it was applied to and gave.
    """

    module: str
    source: str
    parameter: str
    in_features: int
    out_features: int
    dtype: str
    forward: list[int] = field(default_factory=list)
    backward_data: list[int] = field(default_factory=list)
    backward_weight: list[int] = field(default_factory=list)
    inputs: set[int] = field(default_factory=set)
    outputs: set[int] = field(default_factory=set)

    @property
    def path(self) -> str:
        """Its module's, or the weight's own where it is one of several parameters of a module."""
        own = self.parameter.removesuffix(".weight")
        return own if own.startswith(self.module) else self.module

    @property
    def indices(self) -> list[int]:
        """All its products, in order."""
        return sorted(self.forward + self.backward_data + self.backward_weight)

    def resized(self, op: Gemm, phase: str, in_features: int, out_features: int) -> Gemm:
        """One of this layer's products with other feature sizes; the rows stay."""
        if phase == FORWARD:
            m, n, k = op.m, out_features, in_features
        elif phase == BACKWARD_DATA:
            m, n, k = op.m, in_features, out_features
        elif (op.m, op.n) == (self.out_features, self.in_features):
            m, n, k = out_features, in_features, op.k
        else:
            m, n, k = in_features, out_features, op.k
        return replace(op, m=m, n=n, k=k, ld_a=0, ld_b=0)


def gemm(step: Step, index: int) -> Gemm:
    """The product that an operation is known to be."""
    op = step.ops[index].op
    assert isinstance(op, Gemm)
    return op


def weight(entry: StepOp) -> TensorRef | None:
    """The parameter that is the second matrix of a product; None if there is none."""
    op = entry.op
    if not isinstance(op, Gemm):
        return None
    for ref in entry.inputs:
        if ref.parameter and len(ref.shape) >= 2 and {*ref.shape[-2:]} == {op.k, op.n}:
            return ref
    return None


def linears(step: Step) -> list[Linear]:
    """The linear layers, in the order of their first product.

    Forward and data gradient are recognised by the weight among their operands, the weight gradient by
    its module and its sizes. A data gradient may be made elsewhere than its product, by an autograd function
    that serves several layers.
    """
    layers: dict[tuple[str, str, int, int], Linear] = {}
    by_module: dict[str, list[Linear]] = {}
    gradients: list[tuple[int, StepOp, Gemm]] = []
    for index, entry, op in step.each(Gemm):
        if entry.phase == BACKWARD_WEIGHT:
            gradients.append((index, entry, op))
            continue
        operand = weight(entry)
        if operand is None:
            continue
        sizes = (op.k, op.n) if entry.phase == FORWARD else (op.n, op.k)
        key = (entry.site.module, operand.parameter, *sizes)
        layer = layers.get(key)
        if layer is None and entry.phase == BACKWARD_DATA:
            layer = next((known for (_, *rest), known in layers.items() if rest == [*key[1:]]), None)
        if layer is None:
            layer = Linear(entry.site.module, entry.site.source, operand.parameter, *sizes, op.dtype)
            layers[key] = layer
            by_module.setdefault(layer.module, []).append(layer)
        if entry.phase == FORWARD:
            layer.forward.append(index)
            layer.inputs.update(ref.id for ref in entry.inputs if not ref.parameter)
            layer.outputs.update(ref.id for ref in entry.outputs)
        else:
            layer.backward_data.append(index)
    for index, entry, op in gradients:
        either = ((op.m, op.n), (op.n, op.m))
        fitting = [
            layer
            for layer in by_module.get(entry.site.module, ())
            if (layer.out_features, layer.in_features) in either
        ]
        # Several layers of one size in one module are told apart by what they were applied to.
        reads = {ref.id for ref in entry.inputs}
        fitting.sort(key=lambda layer: not (reads & layer.inputs))
        if fitting:
            fitting[0].backward_weight.append(index)
    return list(layers.values())


def products(step: Step, layer: Linear) -> Iterator[tuple[int, Gemm]]:
    """A layer's products with their indices."""
    for index in layer.indices:
        yield index, gemm(step, index)


def inner_sizes(layers: list[Linear]) -> dict[tuple[int, str], list[Linear]]:
    """The layers by feature size and element type, for the sizes that are the designer's choice.

    The inputs of the first layers and the outputs of the last ones are given by the data, so a size counts
    only if some layer has it as output and some layer as input.
    """
    outputs = {layer.out_features for layer in layers}
    inputs = {layer.in_features for layer in layers}
    groups: dict[tuple[int, str], list[Linear]] = {}
    for layer in layers:
        for size in dict.fromkeys((layer.in_features, layer.out_features)):
            if size in outputs and size in inputs:
                groups.setdefault((size, layer.dtype), []).append(layer)
    return groups
