"""One layer's forward and backward pass by the persistent kernels or the reference.

The large products that follow a backward pass are in :mod:`tilefit.rnn.products`; how the passes become an
operator, and layers a stack, in :mod:`tilefit.rnn.operator` and :mod:`tilefit.rnn.stack`.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from tilefit.cost.recurrent_times import PERSISTENT
from tilefit.rnn import products, reference
from tilefit.rnn.cells import Backward, Cell, Forward
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


def forward(
    cell: Cell,
    backend: str,
    keep: str,
    x: Tensor,
    weights: Weights,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    reset: Tensor | None,
) -> Forward:
    """Run a layer over its sequence.

    Args:
        cell: Which recurrence.
        backend: ``persistent`` or ``reference``.
        keep: What is returned for :func:`backward`; the rest may be empty.
        x: [T, B, I]
        weights: The layer's.
        h0, c0: Initial state, [D, B, H]; None for zeros.
        lengths: int32[B], steps of each row; None: all T.
        reset: uint8[T, B]: 1 where the state is zero before the step.
    """
    w_ih, w_hh, bias, bias_n = weights
    xg = products.project(x, w_ih, bias, len(w_hh))
    if backend != PERSISTENT:  # to its kernels, None is zeros
        h0, c0 = _initial(x, w_hh, cell, h0, c0)
    result: Forward = _passes(backend).forward(
        cell, xg, w_hh, bias_n, h0, c0, lengths, reset, save=keep != NOTHING
    )
    return result if result.h_n is not None else result._replace(h_n=final(result.out, h0, lengths))


def backward(
    cell: Cell,
    backend: str,
    keep: str,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    x: Tensor,
    weights: Weights,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    reset: Tensor | None,
    results: tuple[Tensor, Tensor, Tensor],
) -> Backward:
    """Gradients of a layer's pre-activations and initial state.

    Args:
        cell, backend, keep, x, weights, h0, c0, lengths, reset: As of :func:`forward`.
        grads: Gradients of the output [T, B, D, H] and of the final states [D, B, H]; None for zeros.
        results: ``out`` [T, B, D, H], ``gates`` and ``c`` of :func:`forward`.
    """
    out, gates, c = results
    w_ih, w_hh, bias, bias_n = weights
    if keep == STATES and cell.saved:
        xg = products.project(x, w_ih, bias, len(w_hh))
        gates = products.rebuilt_gates(cell, xg, w_hh, bias_n, out, h0, lengths, reset)
        del xg
    grad_out, grad_hn, grad_cn = grads
    if backend != PERSISTENT:
        h0, c0 = _initial(x, w_hh, cell, h0, c0)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grad_hn = torch.zeros_like(h0) if grad_hn is None else grad_hn
        grad_cn = torch.zeros_like(h0) if grad_cn is None else grad_cn
    result: Backward = _passes(backend).backward(
        cell,
        grad_out,
        grad_hn,
        grad_cn if cell.has_c else None,
        (out, gates, c),
        w_hh,
        h0,
        c0,
        lengths,
        reset,
    )
    return result


def differentiable(
    cell: Cell,
    x: Tensor,
    weights: Weights,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and final states by operations that PyTorch differentiates and transforms itself."""
    w_ih, w_hh, bias, bias_n = weights
    xg = products.project(x, w_ih, bias, len(w_hh))
    start_h, start_c = _initial(x, w_hh, cell, h0, c0)
    result = reference.forward(cell, xg, w_hh, bias_n, start_h, start_c, lengths, reset, save=False)
    return result.out, final(result.out, h0, lengths), result.c_n


def _passes(backend: str) -> ModuleType:
    """Where the forward and backward functions of a backend are."""
    return persistent() if backend == PERSISTENT else reference


def _initial(
    x: Tensor, w_hh: Tensor, cell: Cell, h0: Tensor | None, c0: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The initial state as tensors: zeros where none is given."""
    if h0 is None or (cell.has_c and c0 is None):
        zeros = x.new_zeros((w_hh.shape[0], x.shape[1], w_hh.shape[-1]))
        h0 = zeros if h0 is None else h0
        c0 = zeros if c0 is None else c0
    return h0, c0 if cell.has_c else None
