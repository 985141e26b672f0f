"""How padded channels can travel through a model: which images stay padded, and where they are cropped.

Images here are also the features of linear layers: their channels are the last dimension. A padded channel
leaves a layer as zeros. Batch normalisation with padded parameters keeps it zero; pooling, resizing and
functions that work element by element make some finite number of it, the next layer multiplies that by zero,
and the gradient that comes back is zero. Two images that are added must be padded alike. Whatever else reads
an image must find the channels it always had, so that the image is cropped by the module that makes it.

All this is read off the model's ``forward``, traced symbolically in training and in evaluation mode: a trace
has no branches that depend on data or sizes, so that what holds for it holds for every input. Where a module
cannot be traced, the modules it is made of are, if a step calls them as their own ``forward`` does.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from tilefit.fixes.changes.behaviour import behaviours, is_replaced
from tilefit.fixes.changes.hooks import has_hooks
from tilefit.fixes.changes.region import Opened
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds.padding.elementwise import (
    CHANNELWISE_FUNCTIONS,
    CHANNELWISE_METHODS,
    ELEMENTWISE_MODULES,
    of_padding,
)
from tilefit.fixes.kinds.padding.interior import Interior, traced
from tilefit.fixes.kinds.padding.layers import (
    CONVOLUTIONS,
    NORMS,
    Fitted,
    Layer,
    Wide,
    channels_of,
    dims_of,
    kind_of,
)
from tilefit.fixes.kinds.padding.tensors import Channels

#: Modules that treat every channel by itself, and need not know how many there are.
_CHANNELWISE_MODULES: tuple[type[nn.Module], ...] = (
    *ELEMENTWISE_MODULES,
    *(
        getattr(nn, f"{kind}Pool{n}d")
        for kind in ("Max", "Avg", "AdaptiveAvg", "AdaptiveMax")
        for n in (1, 2, 3)
    ),
    *(getattr(nn, f"{kind}Pad{n}d") for kind in ("Zero", "Reflection", "Replication") for n in (1, 2, 3)),
    *(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d),
)
#: Drops whole samples, whatever their channels.
_STOCHASTIC_DEPTH = "torchvision.ops.stochastic_depth.stochastic_depth"
#: What may be asked of an image without learning how many channels it has.
_WITHOUT_CHANNELS = ("dtype", "device", "ndim", "dim", "is_cuda", "requires_grad")
#: Functions and modules whose results are never infinite.
_BOUNDED = ("sigmoid", "hardsigmoid", "tanh")
#: Modules with more parts than this are not looked through for chains of linear layers.
_MOST_MODULES = 60


@dataclass(frozen=True, slots=True)
class Trace:
    """A module's ``forward``, traced in training and in evaluation mode, and the path of the module."""

    path: str
    graphs: tuple[fx.Graph, fx.Graph]


def traces(run: Run) -> list[Trace]:
    """The largest parts of a run's model that can be traced, and that a step calls."""
    return list(_traces(run.model, "", cache(partial(_called, run))))


def paddings(
    model: nn.Module, found: Iterable[Trace], sizes: Mapping[int, int], inputs: Mapping[int, int]
) -> dict[str, Wide]:
    """What every module has to do, by path, so that these numbers of channels are padded where they can be.

    Args:
        model: The model.
        found: Its traces.
        sizes: Channels of images, by what they are to be padded to.
        inputs: The same for images that come from elsewhere and are padded by the convolution that reads
            them.
    """
    todo: dict[nn.Module, tuple[str, Wide | None]] = {}
    for trace in found:
        for path, module, wide in _Paths(model.get_submodule(trace.path), trace, sizes, inputs).paddings():
            todo.setdefault(module, (path, wide))
    for path, module in model.named_modules():
        if module not in todo and isinstance(module, _ConvNd) and _is_whole(module):
            todo[module] = path, by_itself(module, sizes, inputs)
    return {path: wide for path, wide in todo.values() if wide is not None}


def chains(model: nn.Module, layers: Iterable[str], size: int, wide: int) -> dict[str, Wide]:
    """What plain linear layers, some with ``size`` outputs, some with as many inputs, hand to each other when
    these are padded to ``wide``, and what the batch norms between them have to do.

    Smaller modules are traced before the larger ones they are part of: what is done to a part of a model
    keeps nothing from staying padded in another. Of rows nothing is said.
    """
    left = dict.fromkeys(layers)
    found: dict[str, Wide] = {}
    for path in _parents(left):
        prefix, root = f"{path}." if path else "", model.get_submodule(path)
        linears = {model.get_submodule(name) for name in left if name.startswith(prefix)}
        is_small = sum(1 for _ in root.modules()) <= _MOST_MODULES
        graphs = traced(root, linears.__contains__) if is_small else None
        if graphs is None:
            continue
        for at, _, each in _Paths(root, Trace(path, graphs), {size: wide}, {}, linears).paddings():
            if each and (each.takes or each.gives):
                found[at] = each.along(found.get(at, each))
                if each.gives:
                    left.pop(at, None)
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


def _is_whole(module: _ConvNd) -> bool:
    """Whether a plain convolution reads all channels for each that it writes."""
    return type(module) in CONVOLUTIONS and module.groups == 1 and _is_ours(module)


def by_itself(layer: Layer, sizes: Mapping[int, int], inputs: Mapping[int, int]) -> Wide | None:
    """A layer that pads what it reads and crops what it writes; None where it has none of the sizes."""
    into, out = channels_of(layer)
    wide_in, wide_out = _padded(into, inputs), _padded(out, sizes)
    if wide_in is wide_out is None:
        return None
    return Fitted(wide_in, wide_out, dims=dims_of(layer))


def _padded(channels: int, sizes: Mapping[int, int]) -> Channels | None:
    wide = sizes.get(channels, channels)
    return (channels, wide) if wide > channels else None


# ---- kinds of modules --------------------------------------------------------------------------

#: What :func:`_kind` says of a module.
_LAYER, _NORM, _CHANNELWISE, _OPAQUE = "layer", "norm", "channelwise", ""


def _kind(module: nn.Module) -> str:
    """What a module does to padded channels; nothing is known of one that was changed or is watched."""
    if not _is_ours(module) or has_hooks(module):
        return _OPAQUE
    if isinstance(module, _ConvNd) and type(module) in CONVOLUTIONS:
        return _LAYER if module.groups == 1 else _OPAQUE
    if isinstance(module, _BatchNorm) and type(module) in NORMS:
        return _NORM if module.eps > 0 else _OPAQUE
    does_more = getattr(module, "return_indices", False) or getattr(module, "p", 0)  # of dropout
    return _CHANNELWISE if type(module) in _CHANNELWISE_MODULES and not does_more else _OPAQUE


def _is_ours(module: nn.Module) -> bool:
    """Whether a module does what its class says, untouched or changed by the fixes of layers."""
    known = all(isinstance(each, Wide) for each in behaviours(module))
    return known and not is_replaced(module)


# ---- tracing -----------------------------------------------------------------------------------


def _traces(module: nn.Module, path: str, called: Callable[[], set[str]]) -> Iterator[Trace]:
    if isinstance(module, _ConvNd) or not any(isinstance(part, _ConvNd) for part in module.modules()):
        return
    graphs = traced(module, lambda part: bool(_kind(part)))
    if graphs is not None and (not path or path in called()):
        yield Trace(path, graphs)
        parts = sorted({str(n.target) for graph in graphs for n in graph.nodes if n.op == "call_module"})
    else:
        parts = [name for name, _ in module.named_children()]
    for name in parts:
        yield from _traces(module.get_submodule(name), f"{path}.{name}" if path else name, called)


def _called(run: Run) -> set[str]:
    """Paths of the modules that a step calls."""
    trial, found = run.on_meta(), set[str]()
    for path, module in trial.model.named_modules():
        # A function, which the copies that are captured share.
        module.register_forward_pre_hook(lambda *_, path=path: found.add(path))
    trial.capture()
    return found


# ---- the paths of channels ---------------------------------------------------------------------


class _Paths:
    """The images in the graphs of a module.

    Images that meet in a function, and all that a module makes in its calls, are one group: padded alike or
    not at all. A module stands between the group it reads and the group it writes, and can crop.

    Args:
        root: The module.
        trace: Of it.
        sizes, inputs: As for :func:`paddings`.
        linears: The linear layers that there are to be, in place of convolutions.
    """

    def __init__(
        self,
        root: nn.Module,
        trace: Trace,
        sizes: Mapping[int, int],
        inputs: Mapping[int, int],
        linears: Collection[nn.Module] = (),
    ) -> None:
        self._path, self._sizes, self._inputs, self._linears = trace.path, sizes, inputs, linears
        self._region: Any = Opened(trace.path, Interior)
        nodes = [node for graph in trace.graphs for node in graph.nodes]
        self._modules = {n: root.get_submodule(str(n.target)) for n in nodes if n.op == "call_module"}
        self._calls: dict[nn.Module, list[fx.Node]] = {}
        for node, module in self._modules.items():
            self._calls.setdefault(module, []).append(node)
        #: Channels and spatial dimensions of each image that is understood.
        self._images: dict[fx.Node, tuple[int, int]] = {}
        #: What padding it would have.
        self._padding: dict[fx.Node, float] = {}
        self._parents: dict[fx.Node, fx.Node] = {}
        self._spoiled: set[fx.Node] = set()
        for node in nodes:
            self._visit(node)
        for module, calls in self._calls.items():
            if not self._is_function(module):
                self._join_calls(calls)
        for image in self._images:
            if not all(self._serves(image, user) for user in image.users):
                self._spoiled.add(image)

    def _kind(self, module: nn.Module) -> str:
        kind = _kind(module)
        if module in self._linears and not has_hooks(module):
            return _LAYER
        return kind if kind in (_CHANNELWISE, _NORM) or not self._linears else _OPAQUE

    # ---- groups ------------------------------------------------------------------------------

    def _group(self, image: fx.Node) -> fx.Node:
        """The image that stands for a group."""
        while image in self._parents:
            image = self._parents[image]
        return image

    def _join(self, one: fx.Node, other: fx.Node) -> None:
        one, other = self._group(one), self._group(other)
        if one is not other:
            self._parents[other] = one
            if self._images[one][0] != self._images[other][0]:
                self._spoiled.add(one)

    def _join_calls(self, calls: list[fx.Node]) -> None:
        understood = [node for node in calls if node in self._images]
        for node in understood[1:]:
            self._join(understood[0], node)
        read = [image for node in understood if (image := self._read(node)) is not None]
        for image in read[1:]:
            self._join(read[0], image)

    def _read(self, call: fx.Node) -> fx.Node | None:
        """The image that a module is called with, if it is understood."""
        first = call.args[0] if len(call.args) == 1 and not call.kwargs else None
        return first if isinstance(first, fx.Node) and first in self._images else None

    def _is_function(self, module: nn.Module) -> bool:
        """Whether a module is used in several places, so that it cannot crop for one and not for another; or
        is not to crop, since features of linear layers stay padded for other layers alone."""
        calls = self._calls[module]
        is_many = len({node.graph for node in calls}) < len(calls)
        return self._kind(module) == _CHANNELWISE and (is_many or bool(self._linears))

    # ---- what each call does -----------------------------------------------------------------

    def _visit(self, node: fx.Node) -> None:
        if node.op == "call_module":
            self._visit_module(node)
        elif self._is_channelwise(node):
            (image,) = node.all_input_nodes[:1]
            self._found(node, *self._images[image], self._padding[image])
            self._join(image, node)
        else:
            self._visit_elementwise(node, None)

    def _found(self, image: fx.Node, channels: int, dims: int, padding: float = 0.0) -> None:
        self._images[image], self._padding[image] = (channels, dims), padding

    def _visit_module(self, node: fx.Node) -> None:
        module, image = self._modules[node], self._read(node)
        kind = self._kind(module)
        if kind == _LAYER and len(node.args) == 1 and not node.kwargs:
            assert isinstance(module, Layer)
            self._found(node, channels_of(module)[1], dims_of(module))
        elif image is None:
            return
        elif isinstance(module, ELEMENTWISE_MODULES) and kind:
            self._visit_elementwise(node, module)
        elif kind == _NORM or (kind and self._images[image][1]):
            channels, dims = self._images[image]
            is_pool = kind == _CHANNELWISE
            self._found(node, channels, dims, self._padding[image] if is_pool else 0.0)
            if self._is_function(module):
                self._join(image, node)

    def _visit_elementwise(self, node: fx.Node, module: nn.Module | None) -> None:
        """A function of images of one number of channels, and perhaps of masks with one."""
        operands = node.all_input_nodes
        if not operands or not all(operand in self._images for operand in operands):
            return
        if len({self._images[operand][1] for operand in operands}) > 1:
            return
        channels = max(self._images[operand][0] for operand in operands)
        masks = {operand for operand in operands if self._images[operand][0] != channels}
        padding = of_padding(node, module, self._padding | dict.fromkeys(masks, 1.0))
        # A mask is a factor of zeros: whatever finite number it is, they stay zeros.
        if padding is None or not all(map(self._is_mask, masks)) or (masks and padding):
            return
        self._found(node, channels, self._images[operands[0]][1], padding)
        self._spoiled |= masks
        if module is None or self._is_function(module):
            for operand in operands:
                if operand not in masks:
                    self._join(operand, node)

    def _is_mask(self, image: fx.Node) -> bool:
        """Whether an image has one channel, of bounded numbers."""
        made_by = self._modules.get(image, image.target)
        name = type(made_by).__name__ if image in self._modules else getattr(made_by, "__name__", made_by)
        return self._images[image][0] == 1 and str(name).lower() in _BOUNDED

    def _is_channelwise(self, node: fx.Node) -> bool:
        """Whether a function does the same to every channel of its first argument."""
        image = node.args[0] if node.args else None
        if not isinstance(image, fx.Node) or image not in self._images:
            return False
        if any(other in self._images for other in node.all_input_nodes[1:]):
            return False
        if node.op == "call_method" and node.target in CHANNELWISE_METHODS:
            return True
        dims = self._images[image][1]
        if dims and node.target in (torch.mean, "mean"):
            return self._is_spatial_mean(node, dims)
        # To functions of images features are something else.
        if not dims or node.op != "call_function" or node.kwargs.get("return_indices"):
            return False
        name = f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__name__', '')}"
        return node.target in CHANNELWISE_FUNCTIONS or name == _STOCHASTIC_DEPTH

    def _is_spatial_mean(self, node: fx.Node, dims: int) -> bool:
        over = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        over = over if isinstance(over, list | tuple) else (over,)
        keepdim = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
        return keepdim is True and all(_is_spatial(dim, dims) for dim in over)

    # ---- who reads it ------------------------------------------------------------------------

    def _serves(self, image: fx.Node, user: fx.Node) -> bool:
        """Whether an image with padded channels does for a user, that is: is understood."""
        module = self._modules.get(user)
        if isinstance(module, Layer) and (channels_of(module)[0], dims_of(module)) != self._images[image]:
            return False
        # What also reads an image from elsewhere could not tell one of a wrong size from one that is padded.
        if module is not None and any(self._read(call) is None for call in self._calls[module]):
            return False
        return user in self._images or self._asks_no_channels(user, self._images[image][1])

    def _asks_no_channels(self, user: fx.Node, dims: int) -> bool:
        """Whether a call asks an image for something that does not depend on how many channels it has."""
        name = user.args[1] if user.target is getattr else user.target if user.op == "call_method" else ""
        if name in _WITHOUT_CHANNELS:
            return True
        if not dims:
            return False
        if name == "size" and len(user.args) > 1:
            return _leaves_out_channels(user.args[1], dims)
        return name in ("size", "shape") and all(
            reader.target is operator.getitem and _leaves_out_channels(reader.args[1], dims)
            for reader in user.users
        )

    # ---- the decision ------------------------------------------------------------------------

    def paddings(self) -> Iterator[tuple[str, nn.Module, Wide | None]]:
        """What each module does, if it has something to do, and its path."""
        prefix = f"{self._path}." if self._path else ""
        cropped = self._cropped()

        def wide_of(image: fx.Node | None) -> Channels | None:
            if image is None or self._group(image) in cropped:
                return None
            return _padded(self._images[image][0], self._sizes)

        for module, calls in self._calls.items():
            kind = self._kind(module)
            path = prefix + str(calls[0].target)
            written = next((node for node in calls if node in self._images), None)
            if not kind or written is None:
                continue
            read = next((image for node in calls if (image := self._read(node)) is not None), None)
            wide_in, wide_out = wide_of(read), wide_of(written)
            takes, gives = (None if wide is None else self._region for wide in (wide_in, wide_out))
            if kind == _LAYER:
                assert isinstance(module, Layer)
                alone = by_itself(module, self._sizes, self._inputs)
                if alone is not None:
                    wide_in, wide_out = wide_in or alone.wide_in, wide_out or alone.wide_out
                busy = wide_in is not None or wide_out is not None
            else:
                busy = wide_in is not None and (wide_out is None or kind != _CHANNELWISE)
                wide_out = wide_out or wide_in
            wide = kind_of(module)(wide_in, wide_out, takes, gives, self._images[written][1])
            yield path, module, wide if busy else None

    def _cropped(self) -> set[fx.Node]:
        """The groups that are not padded: what somebody else reads, and what is made of such an image."""
        cropped = {self._group(image) for image in self._spoiled}
        made_of = [
            (self._group(node), self._group(read))
            for node, module in self._modules.items()
            if node in self._images and self._kind(module) != _LAYER and (read := self._read(node))
        ]
        while worse := {made for made, read in made_of if read in cropped} - cropped:
            cropped |= worse
        return cropped


def _is_spatial(dim: Any, dims: int) -> bool:
    """Whether a dimension of [batch, channels, ...] with ``dims`` spatial ones is one of those."""
    return isinstance(dim, int) and (-dims <= dim < 0 or dim >= 2)


def _leaves_out_channels(index: Any, dims: int) -> bool:
    if isinstance(index, slice):
        return index.stop is None and index.step is None and _is_spatial(index.start, dims)
    return index == 0 or _is_spatial(index, dims)
