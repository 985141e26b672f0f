"""One layer's forward and backward pass by the persistent kernels or the reference.

The large products that follow a backward pass are in :mod:`tilefit.rnn.products`; how the passes become an
operator, and layers a stack, in :mod:`tilefit.rnn.operator` and :mod:`tilefit.rnn.stack`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefit.cost.recurrent_times import PERSISTENT
from tilefit.rnn import products, reference
from tilefit.rnn.cells import Backward, Cell, Forward, Grads, Rows
from tilefit.rnn.dispatch import persistent
from tilefit.rnn.states import final

#: What a forward pass keeps for backward: nothing; outputs and cell states; the gates too.
NOTHING, STATES, ALL = "nothing", "states", "all"


class Weights(NamedTuple):
    """One layer's weights, in the element type of the computation.

    Attributes:
        w_ih: [D * G * H, I]
        w_hh: [D, G * H, H]
        bias: [D * G * H]; None without bias. See :func:`tilefit.rnn.products.biases`.
        bias_n: [D, H]; None without bias, and if the cell is no GRU.
    """

    w_ih: Tensor
    w_hh: Tensor
    bias: Tensor | None
    bias_n: Tensor | None


def forward(cell: Cell, backend: str, keep: str, x: Tensor, weights: Weights, rows: Rows) -> Forward:
    """Run a layer over its sequence.

    Args:
        cell: Which recurrence.
        backend: ``persistent`` or ``reference``.
        keep: What is returned for :func:`backward`; the rest may be empty.
        x: [T, B, I]
        weights: The layer's.
        rows: What its rows start from, and where they end.
    """
    w_ih, w_hh, bias, bias_n = weights
    xg = products.project(x, w_ih, bias, len(w_hh))
    if backend != PERSISTENT:  # to its kernels, None is zeros
        rows = _initial(x, w_hh, cell, rows)
    result: Forward = _passes(backend).forward(cell, xg, w_hh, bias_n, rows, save=keep != NOTHING)
    return result if result.h_n is not None else result._replace(h_n=final(result.out, rows.h0, rows.lengths))


def backward(
    cell: Cell,
    backend: str,
    keep: str,
    grads: Grads,
    x: Tensor,
    weights: Weights,
    rows: Rows,
    results: tuple[Tensor, Tensor, Tensor],
) -> Backward:
    """Gradients of a layer's pre-activations and initial state.

    Args:
        cell, backend, keep, x, weights, rows: As of :func:`forward`.
        grads: Of the output and of the final states.
        results: ``out`` [T, B, D, H], ``gates`` and ``c`` of :func:`forward`.
    """
    out, gates, c = results
    w_ih, w_hh, bias, bias_n = weights
    if keep == STATES and cell.saved:
        xg = products.project(x, w_ih, bias, len(w_hh))
        gates = products.rebuilt_gates(cell, xg, w_hh, bias_n, out, rows)
        del xg
    if backend != PERSISTENT:
        rows = _initial(x, w_hh, cell, rows)
        likes: Any = (out, rows.h0, rows.h0)
        grads = Grads(*(torch.zeros_like(t) if g is None else g for g, t in zip(grads, likes, strict=True)))
    if not cell.has_c:
        grads = grads._replace(c_n=None)
    result: Backward = _passes(backend).backward(cell, grads, (out, gates, c), w_hh, rows)
    return result


def differentiable(cell: Cell, x: Tensor, weights: Weights, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Output and final states by operations that PyTorch differentiates and transforms itself."""
    w_ih, w_hh, bias, bias_n = weights
    xg = products.project(x, w_ih, bias, len(w_hh))
    result = reference.forward(cell, xg, w_hh, bias_n, _initial(x, w_hh, cell, rows), save=False)
    return result.out, final(result.out, rows.h0, rows.lengths), result.c_n


def _passes(backend: str) -> ModuleType:
    """Where the forward and backward functions of a backend are."""
    return persistent() if backend == PERSISTENT else reference


def _initial(x: Tensor, w_hh: Tensor, cell: Cell, rows: Rows) -> Rows:
    """Rows with their initial state as tensors: zeros where none is given."""
    h0, c0, lengths, reset = rows
    if h0 is None or (cell.has_c and c0 is None):
        zeros = x.new_zeros((w_hh.shape[0], x.shape[1], w_hh.shape[-1]))
        h0 = zeros if h0 is None else h0
        c0 = zeros if c0 is None else c0
    return Rows(h0, c0 if cell.has_c else None, lengths, reset)
