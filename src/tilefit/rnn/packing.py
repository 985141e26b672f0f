"""A stack's weights in one piece of memory: cast, padded and with directions joined, by one operation.

Kernels and products want a layer's weights in the element type of the computation, both directions side by
side, and rows of whole 16-byte pieces, without which matrix products are several times slower. Made one by
one, these are dozens of operations a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefit.rnn import products
from tilefit.rnn.cells import Layers
from tilefit.rnn.passes import Weights


class Gradients(NamedTuple):
    """Gradients of one layer's weights as the products make them; None where none is needed.

    Attributes:
        w_ih: [D * G * H, I]
        w_hh: [G * H, H] of each direction; a GRU's gates in the order (n, r, z).
        total: Sum of ``dg`` over steps and mini-batch, [D, gradients * H].
    """

    w_ih: Tensor | None
    w_hh: Sequence[Tensor] | None
    total: Tensor | None


class Plain:
    """Weights that are used as they are: of one direction, in the element type of the computation.

    Has what :class:`Packing` has.
    """

    def __init__(self, layers: Layers, inputs: int, hidden: int) -> None:
        self.inputs, self.hidden = inputs, hidden
        self._cell, self._kinds = layers.cell, layers.kinds

    def pack(self, flat: Sequence[Tensor], dtype: torch.dtype) -> None:
        """There is nothing to pack."""

    def layers(self, memory: Tensor | None, flat: Sequence[Tensor], *, biases: bool) -> list[Weights]:
        """The weights of each layer; without ``biases`` they are left out."""
        found = []
        for first in range(0, len(flat), self._kinds):
            w_ih, w_hh, *pair = flat[first : first + self._kinds]
            bias, bias_n = products.biases(self._cell, *pair) if pair and biases else (None, None)
            found.append(
                Weights(w_ih, w_hh.unsqueeze(0), bias, None if bias_n is None else bias_n.unsqueeze(0))
            )
        return found

    def gradients(
        self, layers: Sequence[Gradients], flat: Sequence[Tensor], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients of the weights, where they are needed, from those of the layers."""
        found: list[Tensor | None] = []
        for w_ih, w_hh, total in layers:
            found.append(w_ih)
            found.append(None if w_hh is None else products.torch_order(self._cell, w_hh[0]))
            if self._kinds == 4:
                pair = None if total is None else products.bias_gradients(self._cell, total.view(-1))
                found += pair or (None, None)
        return [grad if need else None for grad, need in zip(found, needed, strict=True)]


class _View(NamedTuple):
    """A part of a tensor's memory: what ``as_strided`` takes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def like(tensor: Tensor) -> _View:
        return _View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def of(self, memory: Tensor) -> Tensor:
        return memory.as_strided(*self)


class _Place(NamedTuple):
    """Where one weight and its gradient lie.

    Attributes:
        shape: What the weight is viewed as to be copied to its place; None: as it is.
        packed: Its place in the packed memory.
        moves: Pairs of a part of its gradient and the part of the layer's that it is; None: all of it.
    """

    shape: tuple[int, ...] | None
    packed: _View
    moves: list[tuple[_View | None, _View | None]]


class Packing:
    """Weights that are copied into memory of their own, in which the directions of a layer lie together.

    In order: w_ih and w_hh of each layer, b_ih of all layers, b_hh of all layers. The parts are found once,
    by cutting up tensors that have no memory (``meta``).

    Args:
        layers: What the stack is made of.
        inputs, hidden: Columns of the first w_ih and of w_hh.
        piece: Elements of which rows are padded to whole multiples, with zeros; but not a single column.
    """

    def __init__(self, layers: Layers, inputs: int, hidden: int, piece: int) -> None:
        cell, depth, directions, self._kinds = layers
        is_gru, gates, sums = cell.is_gru, cell.gates, cell.gradients
        self.inputs, self.hidden = (-(-width // piece) * piece for width in (inputs, hidden))
        if inputs == 1:
            self.inputs = 1  # which takes no product of matrices
        self._is_padded = (self.inputs, self.hidden) != (inputs, hidden)
        # Of each layer's w_ih: parts of its columns, and how wide they are without and with padding.
        columns = [(1, inputs, self.inputs), *[(directions, hidden, self.hidden)] * (depth - 1)]
        shapes: list[tuple[int, ...]] = [
            (directions, gates, self.hidden, *parts)
            for part, _, wide in columns
            for parts in ((part, wide), (1, self.hidden))
        ]
        shapes += [(depth, directions, gates, self.hidden)] * (self._kinds - 2)
        memory = torch.empty(sum(map(prod, shapes)), device="meta")
        self._elements = len(memory)
        parts = [
            part.view(shape)
            for part, shape in zip(torch.split(memory, [*map(prod, shapes)]), shapes, strict=True)
        ]
        biases = parts[2 * depth :]
        # The reset gate of a GRU multiplies the n part of b_hh, which is added by the kernels.
        self._sums = [_View.like(bias[:, :, : 2 if is_gru else gates]) for bias in biases]
        rolled = [(slice(0, 2), slice(1, 3)), (slice(2, 3), slice(0, 1))]
        all_gates = [(slice(gates), slice(gates))]
        moves = [all_gates, rolled, [(slice(3), slice(1, 4))], rolled] if is_gru else [all_gates] * 4
        self._layers: list[list[_View]] = []
        self._places: list[_Place] = []
        for layer, (part, width, _) in enumerate(columns):
            w_ih, w_hh = parts[2 * layer : 2 * layer + 2]
            used = [w_ih.view(-1, w_ih.shape[3] * w_ih.shape[4]), w_hh.view(directions, -1, self.hidden)]
            used += [bias[layer].flatten() for bias in biases[:1]]
            used += [bias[layer, :, 2] for bias in biases[1:] if is_gru]
            self._layers.append([_View.like(t) for t in used])
            total = memory.new_empty((directions, sums, self.hidden))
            for d in range(directions):
                packed = [w_ih[d], w_hh[d], *(bias[layer, d] for bias in biases)]
                gradients = [torch.empty_like(w_ih)[d], torch.empty_like(w_hh[d]), total[d], total[d]]
                own = [(gates, hidden, part, width), (gates, hidden, 1, hidden), *[(gates, hidden)] * 2]
                self._places += map(_place, own, packed, gradients, moves)

    def pack(self, flat: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The weights, in one piece of memory; b_ih with what is added to it of b_hh."""
        new = flat[0].new_zeros if self._is_padded else flat[0].new_empty
        memory = new(self._elements, dtype=dtype)
        places = [place.packed.of(memory) for place in self._places]
        weights = [
            weight if place.shape is None else weight.view(place.shape)
            for weight, place in zip(flat, self._places, strict=True)
        ]
        torch._foreach_copy_(places, weights)
        if self._sums:
            b_ih, b_hh = self._sums
            b_ih.of(memory).add_(b_hh.of(memory))
        return memory

    def layers(self, memory: Tensor | None, flat: Sequence[Tensor], *, biases: bool) -> list[Weights]:
        """The weights of each layer, in packed memory; without ``biases`` they are left out."""
        assert memory is not None
        found = []
        for w_ih, w_hh, *rest in self._layers:
            bias = rest[0].of(memory) if biases and rest else None
            bias_n = rest[1].of(memory) if biases and len(rest) == 2 else None
            found.append(Weights(w_ih.of(memory), w_hh.of(memory), bias, bias_n))
        return found

    def gradients(
        self, layers: Sequence[Gradients], flat: Sequence[Tensor], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients of the weights, where they are needed, from those of the layers."""
        sources: list[Any] = [
            source
            for w_ih, w_hh, total in layers
            for d in range(len(self._places) // (len(layers) * self._kinds))
            for source in (w_ih, None if w_hh is None else w_hh[d], total, total)[: self._kinds]
        ]
        found: list[Tensor | None] = []
        to: list[Tensor] = []
        parts: list[Tensor] = []
        for weight, need, place, source in zip(flat, needed, self._places, sources, strict=True):
            if not need:
                found.append(None)
                continue
            grad = torch.empty_like(weight, memory_format=torch.contiguous_format)
            found.append(grad)
            for target, part in place.moves:
                to.append(grad if target is None else target.of(grad))
                parts.append(source if part is None else part.of(source))
        if to:
            torch._foreach_copy_(to, parts)
        return found


def _place(
    own: tuple[int, ...], packed: Tensor, gradient: Tensor, moves: Sequence[tuple[slice, slice]]
) -> _Place:
    """Where a weight lies that is of size ``own``: gates, units and, of a matrix, parts and columns."""
    weight = packed.new_empty(own)
    is_padded = packed.shape != weight.shape
    whole = _View.like(_cut(weight, own))
    is_all = gradient.untyped_storage().nbytes() == gradient.nbytes and len(own) > 2
    found: list[tuple[_View | None, _View | None]] = []
    for to, part in moves:
        target = _View.like(weight[to] if is_padded else _cut(weight[to], own))
        source = _View.like(_cut(gradient[part], own))
        found.append((None if target == whole else target, None if is_all and source == whole else source))
    return _Place(own if is_padded else None, _View.like(_cut(packed, own)), found)


def _cut(gates: Tensor, own: tuple[int, ...]) -> Tensor:
    """Gates without their padding; as rows and columns, or elements of a bias, where there is none."""
    if gates.shape[1:] != own[1:]:
        return gates[(slice(None), *map(slice, own[1:]))]
    rows = gates.flatten(0, 1)
    return rows.flatten(1) if rows.dim() > 1 else rows
