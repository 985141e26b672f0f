"""Layers that hand their output to each other through elementwise functions alone: it can stay padded.

A padded column leaves a layer as zeros. A function that works element by element makes some finite number of
them, the next layer multiplies that by zeros, and the gradient that comes back is zero. Nothing else may see
such a column.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx, nn

from tilefit.fixes.elementwise import of_padding
from tilefit.fixes.interior import has_hooks, traced

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
        parent = model.get_submodule(path)
        inside = {parent.get_submodule(name.removeprefix(prefix)) for name in left if name.startswith(prefix)}
        graphs = (
            traced(parent, inside.__contains__) if sum(1 for _ in parent.modules()) <= _MOST_MODULES else None
        )
        if not graphs:
            continue
        training, evaluating = (_Graph(graph, parent, inside, size).chains() for graph in graphs)
        for givers, takers in training if training == evaluating else []:
            chain = Chain(path, *(tuple(prefix + name for name in names) for names in (givers, takers)))
            found.append(chain)
            for layer in chain.givers:
                left.pop(layer, None)
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


class _Graph:
    """The traced ``forward`` of a module, and the layers among its parts."""

    def __init__(self, graph: fx.Graph, parent: nn.Module, layers: set[nn.Module], size: int) -> None:
        self.nodes = list(graph.nodes)
        self.modules = {n: parent.get_submodule(str(n.target)) for n in self.nodes if n.op == "call_module"}
        self.layers = {n: m for n, m in self.modules.items() if isinstance(m, nn.Linear) and m in layers}
        self.size = size

    def chains(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        padded: dict[fx.Node, float] = {}
        for node in self.nodes:
            inputs = node.all_input_nodes
            if node in self.layers and self.layers[node].out_features == self.size:
                padded[node] = 0.0
            elif node not in self.layers and inputs and padded.keys() >= set(inputs):
                value = of_padding(node, self.modules.get(node), padded)
                if value is not None:
                    padded[node] = value
        found, left = [], set(padded)
        for node in self.nodes:
            if node not in left:
                continue
            group = self._connected(node, left)
            left -= group
            readers = {user for member in group for user in member.users} - group
            # What also reads something else could not tell a wrong size from a padded one.
            calls = {n for n in self.nodes if n in self.layers and n.target in {r.target for r in readers}}
            takes = readers and calls <= readers and all(map(self._takes, readers))
            if takes and not self._has_hooks(group | readers):
                found.append((self._names(group), self._names(readers)))
        return found

    def _takes(self, node: fx.Node) -> bool:
        return node in self.layers and self.layers[node].in_features == self.size

    def _names(self, nodes: set[fx.Node]) -> tuple[str, ...]:
        """Names of the layers among nodes, in order."""
        return tuple(dict.fromkeys(str(n.target) for n in self.nodes if n in nodes and n in self.layers))

    def _connected(self, start: fx.Node, padded: set[fx.Node]) -> set[fx.Node]:
        """What stays padded together or not at all: what meets in a function, and all calls of a layer."""
        group: set[fx.Node] = set()
        todo = [start]
        while todo:
            node = todo.pop()
            if node in group or node not in padded:
                continue
            group.add(node)
            if node in self.layers:
                todo += [other for other in self.nodes if other.target == node.target]
            else:
                todo += node.all_input_nodes
            todo += [user for user in node.users if user not in self.layers]
        return group

    def _has_hooks(self, nodes: set[fx.Node]) -> bool:
        return any(has_hooks(self.modules[node]) for node in nodes if node in self.modules)
