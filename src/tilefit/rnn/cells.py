"""The recurrent cells: sizes of what a step computes, saves and returns.

Sizes in this package: T steps, B mini-batch, D directions (1 or 2), H hidden size, G gates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

#: What the persistent kernels load and exchange at once: rows of their tensors are whole multiples.
PIECE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of cell.

    Attributes:
        name: What the operator and the kernels call it.
        mode: What ``torch.nn.RNNBase`` calls it.
        gates: Blocks of H rows in its weights, in torch's order (LSTM i, f, g, o; GRU r, z, n).
        saved: Blocks of H columns a step saves for backward: its gates, and for a GRU also
            ``W_hn h + b_hn``. An RNN's output says it all.
        gradients: Blocks of H columns of a step's pre-activation gradient. A GRU's are (dn * r, dr, dz, dn):
            the first three go to the hidden state, the last three to the input.
    """

    name: str
    mode: str
    gates: int
    saved: int
    gradients: int

    @property
    def has_c(self) -> bool:
        """Whether it has a cell state besides the hidden state."""
        return self.mode == "LSTM"

    @property
    def is_gru(self) -> bool:
        """Whether the reset gate multiplies a part of the product."""
        return self.mode == "GRU"


CELLS = {
    cell.name: cell
    for cell in (
        Cell("rnn_tanh", "RNN_TANH", gates=1, saved=0, gradients=1),
        Cell("rnn_relu", "RNN_RELU", gates=1, saved=0, gradients=1),
        Cell("lstm", "LSTM", gates=4, saved=4, gradients=4),
        Cell("gru", "GRU", gates=3, saved=4, gradients=4),
    )
}
BY_MODE = {cell.mode: cell for cell in CELLS.values()}


class Layers(NamedTuple):
    """What a stack is made of; its weights are a list as ``torch.nn.RNNBase._flat_weights`` is one.

    Attributes:
        cell: Which recurrence.
        depth: How many there are.
        directions: D
        kinds: Weights of one direction of a layer: w_ih and w_hh and, with bias, b_ih and b_hh; with a
            projection one more.
    """

    cell: Cell
    depth: int
    directions: int
    kinds: int


class Rows(NamedTuple):
    """What the rows of a mini-batch start from, and where they end and start again.

    Attributes:
        h0, c0: Initial hidden and cell state, [D, B, H], of a stack [layers * D, B, H]; None for zeros, and
            c0 also if the cell has none.
        lengths: Steps of each row, int32[B]; None: all T. Direction 1 starts at a row's last step.
        reset: uint8[T, B]; where not 0, the state is zero before the step, in both directions.
    """

    h0: torch.Tensor | None = None
    c0: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    reset: torch.Tensor | None = None


class Grads(NamedTuple):
    """Gradients of what a forward pass returns; None for zeros, and for the cell state if there is none.

    Attributes:
        out: [T, B, D, H]; what it says beyond a row's length is ignored.
        h_n, c_n: [D, B, H]
    """

    out: torch.Tensor | None = None
    h_n: torch.Tensor | None = None
    c_n: torch.Tensor | None = None


class Joined(NamedTuple):
    """One layer's weights with the directions as their first dimension; no biases without bias.

    Attributes:
        w_ih, w_hh: [D, G * H, I] and [D, G * H, H]
        b_ih, b_hh: [D, G * H]
    """

    w_ih: torch.Tensor
    w_hh: torch.Tensor
    b_ih: torch.Tensor | None = None
    b_hh: torch.Tensor | None = None


class Forward(NamedTuple):
    """What a forward pass over a layer returns; a tensor the cell does not have, or need not save, is empty.

    Attributes:
        out: [T, B, D, H]; 0 beyond a row's length.
        c_n: [D, B, H]
        gates: [T, B, D, saved * H]
        c: [T, B, D, H] in fp32 (fp64 for fp64)
        h_n: [D, B, H]; None where it has to be taken from ``out``.
    """

    out: torch.Tensor
    c_n: torch.Tensor
    gates: torch.Tensor
    c: torch.Tensor
    h_n: torch.Tensor | None = None


class Backward(NamedTuple):
    """What a backward pass over a layer returns.

    Attributes:
        dg: Gradient of the pre-activations, [T, B, D, gradients * H]; 0 beyond a row's length.
        grad_h0: [D, B, H]
        grad_c0: [D, B, H]; empty if the cell has none.
    """

    dg: torch.Tensor
    grad_h0: torch.Tensor
    grad_c0: torch.Tensor
