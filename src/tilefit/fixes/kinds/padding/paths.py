"""How padded features travel from one linear layer to the next.

A padded feature leaves a layer as zero. Functions that work element by element make some finite number of it,
the next layer multiplies that by zero, and the gradient that comes back is zero. Two tensors that are added
must be padded alike. Whatever else reads one must find the features it always had, so that it is cropped by
the layer that makes it.

All this is read off a module's ``forward``, traced symbolically in training and in evaluation mode: a trace
has no branches that depend on data or sizes, so that what holds for it holds for every input.

Images stay padded between convolutions nowhere. The compiler fuses what crops them with what pads them again;
without it, that they stayed so paid in no plan that is made for slow hosts, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import fx, nn

from tilefit.fixes.changes.behaviour import behaviours, is_replaced
from tilefit.fixes.changes.hooks import has_hooks
from tilefit.fixes.changes.region import Opened
from tilefit.fixes.kinds.padding.elementwise import ELEMENTWISE_MODULES, KEEPING_METHODS, of_padding
from tilefit.fixes.kinds.padding.interior import Interior, traced
from tilefit.fixes.kinds.padding.layers import Fitted

#: What may be asked of a tensor without learning how many features it has.
_WITHOUT_FEATURES = ("dtype", "device", "ndim", "dim", "is_cuda", "requires_grad")
#: Modules with more parts than this are not looked through for chains of linear layers.
_MOST_MODULES = 60


def chains(model: nn.Module, layers: Iterable[str], size: int) -> dict[str, Fitted]:
    """What plain linear layers, some with ``size`` outputs, some with as many inputs, hand to each other when
    these are padded; of how they are padded nothing is said.

    Smaller modules are traced before the larger ones they are part of: what is done to a part of a model
    keeps nothing from staying padded in another.
    """
    left = dict.fromkeys(layers)
    found: dict[str, Fitted] = {}
    for path in _parents(left):
        prefix, root = f"{path}." if path else "", model.get_submodule(path)
        linears = {model.get_submodule(name): name for name in left if name.startswith(prefix)}
        is_small = sum(1 for _ in root.modules()) <= _MOST_MODULES
        graphs = traced(root, linears.__contains__) if is_small else None
        if graphs is None:
            continue
        region: Any = Opened(path, Interior)
        for module, takes, gives in _Paths(root, graphs, linears).handed_on(size):
            each = Fitted(takes=region if takes else None, gives=region if gives else None)
            found[linears[module]] = each.along(found.get(linears[module], each))
            if gives:
                left.pop(linears[module], None)
    return found


def _parents(layers: Iterable[str]) -> list[str]:
    """Paths of the modules that hold at least two of the layers, innermost first; the model's is empty."""
    count: Counter[str] = Counter()
    for path in layers:
        while path:
            path = path.rpartition(".")[0]
            count[path] += 1
    shared = [path for path in count if count[path] > 1]
    return sorted(shared, key=lambda path: len(path.split(".")) if path else 0, reverse=True)


class _Paths:
    """The features in the graphs of a module.

    Tensors that meet in a function, and all that a layer makes in its calls, are one group: padded alike or
    not at all. A layer stands between the group it reads and the group it writes, and can crop.

    Args:
        root: The module.
        graphs: Of it.
        linears: The layers that can pad.
    """

    def __init__(self, root: nn.Module, graphs: Iterable[fx.Graph], linears: Collection[nn.Module]) -> None:
        self._linears = {layer for layer in linears if not has_hooks(layer)}
        nodes = [node for graph in graphs for node in graph.nodes]
        self._modules = {n: root.get_submodule(str(n.target)) for n in nodes if n.op == "call_module"}
        self._calls: dict[nn.Module, list[fx.Node]] = {}
        for node, module in self._modules.items():
            self._calls.setdefault(module, []).append(node)
        #: Features of each tensor that is understood.
        self._sizes: dict[fx.Node, int] = {}
        #: What padding it would have.
        self._padding: dict[fx.Node, float] = {}
        self._parents: dict[fx.Node, fx.Node] = {}
        self._spoiled: set[fx.Node] = set()
        for node in nodes:
            self._visit(node)
        for module in self._linears & self._calls.keys():
            understood = [node for node in self._calls[module] if node in self._sizes]
            self._join(understood)
            self._join([read for node in understood if (read := self._read(node)) is not None])
        for tensor in self._sizes:
            if not all(self._serves(tensor, user) for user in tensor.users):
                self._spoiled.add(tensor)

    def _group(self, tensor: fx.Node) -> fx.Node:
        """The tensor that stands for a group."""
        while tensor in self._parents:
            tensor = self._parents[tensor]
        return tensor

    def _join(self, tensors: list[fx.Node]) -> None:
        for each in tensors[1:]:
            one, other = self._group(tensors[0]), self._group(each)
            if one is not other:
                self._parents[other] = one
                if self._sizes[one] != self._sizes[other]:
                    self._spoiled.add(one)

    def _read(self, call: fx.Node) -> fx.Node | None:
        """The tensor that a module is called with, if it is understood."""
        first = call.args[0] if len(call.args) == 1 and not call.kwargs else None
        return first if isinstance(first, fx.Node) and first in self._sizes else None

    # ---- what each call does -----------------------------------------------------------------

    def _visit(self, node: fx.Node) -> None:
        module, operands = self._modules.get(node), node.all_input_nodes
        if module in self._linears:
            assert isinstance(module, nn.Linear)
            if len(node.args) == 1 and not node.kwargs:
                self._sizes[node], self._padding[node] = module.out_features, 0.0
        elif operands and all(each in self._sizes for each in operands) and _is_plain(module):
            is_kept = node.op == "call_method" and node.target in KEEPING_METHODS
            padding = self._padding[operands[0]] if is_kept else of_padding(node, module, self._padding)
            if padding is not None and len({self._sizes[each] for each in operands}) == 1:
                self._sizes[node], self._padding[node] = self._sizes[operands[0]], padding
                self._join([*operands, node])

    def _serves(self, tensor: fx.Node, user: fx.Node) -> bool:
        """Whether a tensor with padded features does for a user, that is: is understood."""
        module = self._modules.get(user)
        if isinstance(module, nn.Linear) and module.in_features != self._sizes[tensor]:
            return False
        # What also reads a tensor from elsewhere could not tell one of a wrong size from one that is padded.
        if module is not None and any(self._read(call) is None for call in self._calls[module]):
            return False
        name = user.args[1] if user.target is getattr else user.target if user.op == "call_method" else ""
        return user in self._sizes or name in _WITHOUT_FEATURES

    def handed_on(self, size: int) -> Iterator[tuple[nn.Module, bool, bool]]:
        """Layers that can take, and that can give, so many features with padding."""
        cropped = {self._group(tensor) for tensor in self._spoiled}

        def stays(tensor: fx.Node | None) -> bool:
            return tensor is not None and self._sizes[tensor] == size and self._group(tensor) not in cropped

        for module in (each for each in self._calls if each in self._linears):
            calls = [node for node in self._calls[module] if node in self._sizes]
            takes = stays(next((read for node in calls if (read := self._read(node)) is not None), None))
            gives = stays(next(iter(calls), None))
            if takes or gives:
                yield module, takes, gives


def _is_plain(module: nn.Module | None) -> bool:
    """Whether a module is an elementwise function, untouched and unwatched; or there is none."""
    if module is None:
        return True
    is_one = type(module) in ELEMENTWISE_MODULES and not getattr(module, "p", 0)  # of dropout
    return is_one and not (behaviours(module) or is_replaced(module) or has_hooks(module))
