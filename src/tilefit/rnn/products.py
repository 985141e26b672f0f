"""The matrix products of a layer that span all its time steps: input projection, weight and input gradients.

Each is one product where the memory allows it: [T, B, D, columns] is [T * B, D * columns] without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tilefit.rnn.cells import Cell
from tilefit.rnn.dispatch import allows_tf32, cuda_device
from tilefit.rnn.states import previous


@contextmanager
def precision(x: Tensor) -> Iterator[None]:
    """Within the block, fp32 products on CUDA use TF32 if recurrent layers may.

    PyTorch has a setting for matrix products (off by default) and one for cuDNN's recurrent layers (on);
    these are a recurrent layer's.
    """
    if not allows_tf32(x.dtype, cuda_device(x)):
        yield
        return
    matmul = torch.backends.cuda.matmul
    kept = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = kept


def project(
    cell: Cell, x: Tensor, w_ih: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Input projection of all steps and directions, [T, B, D, G * H], with biases, and a GRU's ``bias_n``.

    Args:
        cell: Which recurrence.
        x: [T, B, I]
        w_ih: [D, G * H, I]
        b_ih, b_hh: [D, G * H] or None
    """
    directions, rows, _ = w_ih.shape
    hidden = rows // cell.gates
    flat = x.flatten(0, 1)
    weight = w_ih.flatten(0, 1).t()
    bias_n = None
    if b_ih is None or b_hh is None:
        xg = torch.mm(flat, weight)
        if cell.is_gru:
            bias_n = x.new_zeros((directions, hidden))
    else:
        bias = b_ih + b_hh
        if cell.is_gru:  # the reset gate multiplies the n part of b_hh
            bias = torch.cat([bias[:, : 2 * hidden], b_ih[:, 2 * hidden :]], 1)
            bias_n = b_hh[:, 2 * hidden :]
        xg = torch.addmm(bias.flatten(), flat, weight)
    return xg.view(*x.shape[:2], directions, rows), bias_n


def rebuilt_gates(
    cell: Cell,
    xg: Tensor,
    w_hh: Tensor,
    bias_n: Tensor | None,
    out: Tensor,
    h0: Tensor | None,
    lengths: Tensor | None,
    reset: Tensor | None,
) -> Tensor:
    """The gates that a forward pass did not save, from the outputs it did: [T, B, D, saved * H].

    ``xg`` is overwritten.
    """
    steps, batch, directions, _ = xg.shape
    hidden = w_hh.shape[-1]
    before = previous(out, h0, lengths, reset).flatten(0, 1)
    xg = xg.flatten(0, 1)
    gates = xg.new_empty((steps * batch, directions, cell.saved * hidden)) if cell.is_gru else xg
    for d in range(directions):
        weight, pre, kept = w_hh[d].t(), xg[:, d], gates[:, d]
        if cell.has_c:
            pre.addmm_(before[:, d], weight)
            pre[:, : 2 * hidden].sigmoid_()
            pre[:, 2 * hidden : 3 * hidden].tanh_()
            pre[:, 3 * hidden :].sigmoid_()
        else:
            assert bias_n is not None
            r_z, n, hn = kept[:, : 2 * hidden], kept[:, 2 * hidden : 3 * hidden], kept[:, 3 * hidden :]
            torch.addmm(pre[:, : 2 * hidden], before[:, d], weight[:, : 2 * hidden], out=r_z)
            torch.addmm(bias_n[d], before[:, d], weight[:, 2 * hidden :], out=hn)
            r_z.sigmoid_()
            torch.addcmul(pre[:, 2 * hidden :], r_z[:, :hidden], hn, out=n)
            n.tanh_()
    return gates.view(steps, batch, directions, cell.saved * hidden)


def _to_input(cell: Cell, dg: Tensor) -> list[Tensor]:
    """Gradient of the input projection, [T * B, columns], of all directions at once if that is no copy."""
    steps, batch, directions, columns = dg.shape
    if not cell.is_gru:
        return [dg.view(steps * batch, directions * columns)]
    hidden = columns // cell.gradients
    return [dg.view(steps * batch, directions, columns)[:, d, hidden:] for d in range(directions)]


def input_gradient(cell: Cell, dg: Tensor, w_ih: Tensor) -> Tensor:
    """Gradient of x, [T, B, I]; ``dg`` is that of :class:`~tilefit.rnn.cells.Backward`."""
    first, *rest = parts = _to_input(cell, dg)
    first_weight, *weights = w_ih.view(len(parts), -1, w_ih.shape[-1])
    grad = torch.mm(first, first_weight)
    for part, weight in zip(rest, weights, strict=True):
        grad.addmm_(part, weight)
    return grad.view(*dg.shape[:2], w_ih.shape[-1])


def input_weight_gradient(cell: Cell, dg: Tensor, x: Tensor, w_ih: Tensor) -> Tensor:
    """Gradient of w_ih, [D, G * H, I]."""
    grad = torch.empty_like(w_ih)
    parts = _to_input(cell, dg)
    for part, result in zip(parts, grad.view(len(parts), -1, grad.shape[-1]), strict=True):
        torch.mm(part.t(), x.flatten(0, 1), out=result)
    return grad


def hidden_weight_gradient(
    cell: Cell,
    dg: Tensor,
    out: Tensor,
    h0: Tensor | None,
    lengths: Tensor | None,
    reset: Tensor | None,
    w_hh: Tensor,
) -> Tensor:
    """Gradient of w_hh, [D, G * H, H]: of each step's gradient with the hidden state before the step."""
    directions, rows, hidden = w_hh.shape
    grad = torch.empty_like(w_hh)
    if reset is not None:
        before = previous(out, h0, lengths, reset)
    for d in range(directions):
        to_hidden = dg[:, :, d, :rows]
        if reset is not None:
            states = before[:, :, d]
        elif d == 0:
            to_hidden, states = to_hidden[1:], out[:-1, :, d]
        else:
            to_hidden, states = to_hidden[:-1], out[1:, :, d]
        torch.mm(to_hidden.flatten(0, 1).t(), states.flatten(0, 1), out=grad[d])
        if reset is None and h0 is not None:
            grad[d].addmm_(_first(dg[:, :, d, :rows], d, lengths).t(), h0[d])
    return _torch_order(cell, grad, hidden)


def _first(dg: Tensor, direction: int, lengths: Tensor | None) -> Tensor:
    """Each row's gradient at the step that its recurrence starts with, [B, columns]."""
    if direction == 0:
        return dg[0]
    if lengths is None:
        return dg[-1]
    # A row of length 0 has gradient 0 at every step.
    return dg[(lengths - 1).clamp(min=0).long(), torch.arange(dg.shape[1], device=dg.device)]


def _torch_order(cell: Cell, grad: Tensor, hidden: int) -> Tensor:
    """A gradient over (n, r, z) as one over (r, z, n)."""
    return grad.roll(-hidden, 1) if cell.is_gru else grad


def bias_gradients(cell: Cell, dg: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of b_ih and b_hh, [D, G * H], in memory of their own."""
    total = dg.sum((0, 1))
    if not cell.is_gru:
        return total, total.clone()
    hidden = total.shape[1] // cell.gradients
    return total[:, hidden:].clone(), _torch_order(cell, total[:, : 3 * hidden], hidden)
