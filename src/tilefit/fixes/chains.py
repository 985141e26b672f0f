"""Layers that hand their output to each other through elementwise functions alone: it can stay padded.

A padded column leaves a layer as zeros. A function that works element by element makes some finite number of
them, the next layer multiplies that by zeros, and the gradient that comes back is zero. Nothing else may see
such a column.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx, nn

from tilefit.fixes.elementwise import ELEMENTWISE_MODULES, is_elementwise

#: Modules with more parts than this are not looked through.
_MOST_MODULES = 60


@dataclass(frozen=True, slots=True)
class Chain:
    """Layers whose outputs stay padded on their way to others.

    Attributes:
        parent: Path of the module in whose ``forward`` all this happens.
        givers: Paths of the layers whose output stays padded.
        takers: Paths of the layers that read it.
    """

    parent: str
    givers: tuple[str, ...]
    takers: tuple[str, ...]


def chains(model: nn.Module, layers: Iterable[str], size: int) -> list[Chain]:
    """The chains among plain linear layers, some with ``size`` outputs, some with as many inputs.

    A module's ``forward`` is traced symbolically, in training and in evaluation mode; a module that cannot
    be traced has no chains. Smaller modules are tried before the larger ones they are part of.
    """
    left = dict.fromkeys(layers)
    found = []
    for path in _parents(left):
        prefix = f"{path}." if path else ""
        inside = {layer.removeprefix(prefix) for layer in left if layer.startswith(prefix)}
        for givers, takers in _in_module(model.get_submodule(path), inside, size):
            chain = Chain(path, *(tuple(prefix + name for name in names) for names in (givers, takers)))
            found.append(chain)
            for layer in chain.givers:
                del left[layer]
    return found


def _parents(layers: Iterable[str]) -> list[str]:
    """Paths of the modules that hold at least two of the layers, innermost first; the model's is empty."""
    count: dict[str, int] = {}
    for layer in layers:
        path = layer
        while path:
            path = path.rpartition(".")[0]
            count[path] = count.get(path, 0) + 1
    shared = [path for path in count if count[path] > 1]
    return sorted(shared, key=lambda path: len(path.split(".")) if path else 0, reverse=True)


def _in_module(
    parent: nn.Module, names: set[str], size: int
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Givers and takers of each chain in a module's ``forward``."""
    modules = list(parent.modules())
    arguments = inspect.signature(parent.forward).parameters.values()
    # With a default or a variable number of arguments it may do different things.
    if len(modules) > _MOST_MODULES or any(
        a.default is not a.empty or a.kind in (a.VAR_POSITIONAL, a.VAR_KEYWORD) for a in arguments
    ):
        return []
    modes = [module.training for module in modules]
    tracer = _Tracer([parent.get_submodule(name) for name in names])
    try:
        graphs = [tracer.trace(parent.train(mode)) for mode in (True, False)]
    except Exception:  # noqa: BLE001 - whatever stops the tracer, nothing is known of such a module
        return []
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
    training, evaluating = (_Graph(graph, parent, names, size).chains() for graph in graphs)
    return training if training == evaluating else []


class _Tracer(fx.Tracer):
    def __init__(self, leaves: list[nn.Module]) -> None:
        super().__init__()
        self._leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return any(m is leaf for leaf in self._leaves) or super().is_leaf_module(m, module_qualified_name)


class _Graph:
    """The traced ``forward`` of a module, and the layers named in it."""

    def __init__(self, graph: fx.Graph, parent: nn.Module, names: set[str], size: int) -> None:
        self.nodes = list(graph.nodes)
        self.modules = {
            node: parent.get_submodule(str(node.target)) for node in self.nodes if node.op == "call_module"
        }
        self.names = names
        self.size = size

    def chains(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        padded: set[fx.Node] = set()
        for node in self.nodes:
            inputs = node.all_input_nodes
            if self._gives(node) or (inputs and padded.issuperset(inputs) and self._is_elementwise(node)):
                padded.add(node)
        found = []
        for node in self.nodes:
            if node not in padded:
                continue
            group = self._connected(node, padded)
            padded -= group
            readers = {user for member in group for user in member.users} - group
            if readers and all(map(self._takes, readers)) and not self._has_hooks(group | readers):
                found.append((self._layers(group), self._layers(readers)))
        return found

    def _gives(self, node: fx.Node) -> bool:
        return self._is_layer(node) and bool(self.modules[node].out_features == self.size)

    def _takes(self, node: fx.Node) -> bool:
        return self._is_layer(node) and bool(self.modules[node].in_features == self.size)

    def _is_layer(self, node: fx.Node) -> bool:
        return node in self.modules and node.target in self.names

    def _layers(self, nodes: set[fx.Node]) -> tuple[str, ...]:
        """Names of the layers among nodes, in order."""
        return tuple(dict.fromkeys(str(n.target) for n in self.nodes if n in nodes and self._is_layer(n)))

    def _connected(self, start: fx.Node, padded: set[fx.Node]) -> set[fx.Node]:
        """What stays padded together or not at all: what meets in a function, and all calls of a layer."""
        group: set[fx.Node] = set()
        todo = [start]
        while todo:
            node = todo.pop()
            if node in group or node not in padded:
                continue
            group.add(node)
            if self._is_layer(node):
                todo += [other for other in self.nodes if other.target == node.target]
            else:
                todo += node.all_input_nodes
            todo += [user for user in node.users if not self._is_layer(user)]
        return group

    def _is_elementwise(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self.modules[node], ELEMENTWISE_MODULES)
        return is_elementwise(node)

    def _has_hooks(self, nodes: set[fx.Node]) -> bool:
        """Whether somebody else looks at what goes in or out."""
        return any(
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            for module in (self.modules[node] for node in nodes if node in self.modules)
        )
