"""The matrix products of a layer that span all its time steps: input projection, weight and input gradients.

Each is one product where the memory allows it: [T, B, D, columns] is [T * B, D * columns] without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock

import torch
import torch.nn.functional as F
from torch import Tensor

from tilefit.rnn.call import allows_tf32, cuda_device
from tilefit.rnn.cells import Cell, Rows
from tilefit.rnn.states import previous


def precision(x: Tensor) -> AbstractContextManager[None]:
    """Within the block, fp32 products on CUDA use TF32 if recurrent layers may.

    PyTorch has a setting for matrix products (off by default) and one for cuDNN's recurrent layers (on);
    these are a recurrent layer's.
    """
    return _tf32() if allows_tf32(x.dtype, cuda_device(x)) else _AS_SET


_AS_SET = nullcontext()


class _Users:
    """How many blocks of :func:`_tf32` are under way, in all threads, and the setting before the first."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.count = 0
        self.kept = ""


_users = _Users()


@contextmanager
def _tf32() -> Iterator[None]:
    # The setting is the process's, and autograd runs a thread for each GPU: were every block to put back what
    # it found, one that began within another and ended after it would leave TF32 on for good.
    matmul = torch.backends.cuda.matmul
    with _users.lock:
        if not _users.count:
            _users.kept, matmul.fp32_precision = matmul.fp32_precision, "tf32"
        _users.count += 1
    try:
        yield
    finally:
        with _users.lock:
            _users.count -= 1
            if not _users.count:
                matmul.fp32_precision = _users.kept


def biases(cell: Cell, b_ih: Tensor, b_hh: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the input projection adds, and a GRU's ``bias_n``, both as many-dimensional as the arguments.

    Args:
        cell: Which recurrence.
        b_ih, b_hh: [G * H] or [D, G * H]
    """
    if not cell.is_gru:
        return b_ih + b_hh, None
    r_z = 2 * b_ih.shape[-1] // 3  # the reset gate multiplies the n part of b_hh
    return torch.cat([b_ih[..., :r_z] + b_hh[..., :r_z], b_ih[..., r_z:]], -1), b_hh[..., r_z:]


def project(x: Tensor, w_ih: Tensor, bias: Tensor | None, directions: int) -> Tensor:
    """Input projection of all steps and directions, [T, B, D, G * H], with its bias.

    Args:
        x: [T, B, I]
        w_ih: [D * G * H, I]
        bias: [D * G * H], see :func:`biases`.
        directions: D
    """
    if x.shape[-1] == 1:
        # No sum to compute: a product of matrices could only round its operands to TF32.
        column = w_ih.squeeze(1)
        projected = x * column if bias is None else torch.addcmul(bias, x, column)
    else:
        projected = F.linear(x.contiguous(), w_ih, bias)
    return projected.view(*x.shape[:2], directions, -1)


def rebuilt_gates(
    cell: Cell, xg: Tensor, w_hh: Tensor, bias_n: Tensor | None, out: Tensor, rows: Rows
) -> Tensor:
    """The gates that a forward pass did not save, from the outputs it did: [T, B, D, saved * H].

    ``xg`` is overwritten.
    """
    steps, batch, directions, _ = xg.shape
    hidden = w_hh.shape[-1]
    before = previous(out, rows.h0, rows.lengths, rows.reset).flatten(0, 1)
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
            r_z, n, hn = kept[:, : 2 * hidden], kept[:, 2 * hidden : 3 * hidden], kept[:, 3 * hidden :]
            torch.addmm(pre[:, : 2 * hidden], before[:, d], weight[:, : 2 * hidden], out=r_z)
            if bias_n is None:
                torch.mm(before[:, d], weight[:, 2 * hidden :], out=hn)
            else:
                torch.addmm(bias_n[d], before[:, d], weight[:, 2 * hidden :], out=hn)
            r_z.sigmoid_()
            torch.addcmul(pre[:, 2 * hidden :], r_z[:, :hidden], hn, out=n)
            n.tanh_()
    return gates.view(steps, batch, directions, cell.saved * hidden)


def _matrix(t: Tensor, direction: int, steps: range, first: int, columns: int) -> Tensor:
    """Some steps and columns, from ``first``, of one direction of a dense [T, B, D, C]: [steps * B, columns].

    One view instead of four: at small mini-batches the time of a call is that of its operations.
    """
    _, batch, directions, width = t.shape
    row = directions * width
    offset = t.storage_offset() + steps.start * batch * row + direction * width + first
    return t.as_strided((len(steps) * batch, columns), (row, 1), offset)


def _to_input(cell: Cell, dg: Tensor) -> list[Tensor]:
    """Gradient of the input projection, [T * B, columns], of all directions at once if that is no copy."""
    steps, batch, directions, columns = dg.shape
    if not cell.is_gru:
        return [dg.view(steps * batch, directions * columns)]
    hidden = columns // cell.gradients
    return [_matrix(dg, d, range(steps), hidden, columns - hidden) for d in range(directions)]


def _product(one: Tensor, other: Tensor) -> Tensor:
    """``one @ other``; with a vector not in TF32, as cuDNN's."""
    if other.shape[1] == 1 and other.dtype is torch.float32:
        return torch.mv(one, other.squeeze(1)).unsqueeze(1)
    return torch.mm(one, other)


def input_gradient(cell: Cell, dg: Tensor, w_ih: Tensor) -> Tensor:
    """Gradient of x, [T, B, I]; ``dg`` is that of :class:`~tilefit.rnn.cells.Backward`."""
    first, *rest = _to_input(cell, dg)
    if not rest:
        grad = _product(first, w_ih)
    else:
        first_weight, weight = w_ih.chunk(2)
        grad = torch.mm(first, first_weight).addmm_(rest[0], weight)
    return grad.view(*dg.shape[:2], w_ih.shape[-1])


def input_weight_gradient(cell: Cell, dg: Tensor, x: Tensor) -> Tensor:
    """Gradient of w_ih, [D * G * H, I]."""
    first, *rest = _to_input(cell, dg)
    rows = x.flatten(0, 1)
    if not rest:
        return _product(first.t(), rows)
    grad = rows.new_empty((2 * first.shape[1], rows.shape[1]))
    for part, result in zip((first, *rest), grad.chunk(2), strict=True):
        torch.mm(part.t(), rows, out=result)
    return grad


def hidden_weight_gradient(cell: Cell, dg: Tensor, out: Tensor, rows: Rows) -> list[Tensor]:
    """Gradient of each direction's w_hh, [G * H, H]: of each step's gradient with the state before the step.

    Its gates are in the order of ``dg``: a GRU's is (n, r, z).
    """
    steps, _, directions, hidden = out.shape
    h0, _, lengths, reset = rows
    columns = cell.gates * hidden
    zeroed = None if reset is None else reset.view(torch.bool).unsqueeze(-1)  # the state before these steps
    grads = []
    for d in range(directions):
        earlier, later = (range(steps - 1), range(1, steps))[:: 1 if d == 0 else -1]
        states = _matrix(out, d, earlier, 0, hidden)
        if zeroed is not None:
            states = torch.where(zeroed[later.start : later.stop].flatten(0, 1), 0, states)
        grad = torch.mm(_matrix(dg, d, later, 0, columns).t(), states)
        if h0 is not None:
            initial = h0[d] if zeroed is None else torch.where(_first(zeroed, d, lengths), 0, h0[d])
            if d == 0 or lengths is None:
                start = _matrix(dg, d, range(1) if d == 0 else range(steps - 1, steps), 0, columns)
            else:
                start = _first(dg[:, :, d, :columns], d, lengths)
            if allows_tf32(grad.dtype, cuda_device(grad)):
                start, initial = _exactly(start, initial)
            grad.addmm_(start.t(), initial)
        grads.append(grad)
    return grads


def _exactly(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices of which ``one.t() @ other`` is in TF32 what it is of the arguments in fp32.

    TF32 keeps 11 of fp32's 24 bits. Each argument is parted into these and the rest, and the parts' products
    are added up, but for that of both rests, which is below fp32's precision. An initial state tends to be
    larger than the states of the steps; rounded, it would bring most of the gradient's error.
    """
    (high, rest), (other_high, other_rest) = _parts(one), _parts(other)
    return torch.cat([high, high, rest]), torch.cat([other_high, other_rest, other_high])


def _parts(t: Tensor) -> tuple[Tensor, Tensor]:
    high = (t.view(torch.int32) & -(1 << 13)).view(torch.float32)
    return high, t - high


def _first(values: Tensor, direction: int, lengths: Tensor | None) -> Tensor:
    """Of values [T, B, C] each row's at the step that its recurrence starts with, [B, C]."""
    if direction == 0:
        return values[0]
    if lengths is None:
        return values[-1]
    # A row of length 0 has gradient 0 at every step.
    return values[(lengths - 1).clamp(min=0).long(), torch.arange(values.shape[1], device=values.device)]


def torch_order(cell: Cell, grad: Tensor) -> Tensor:
    """A gradient over (n, r, z), its first dimension, as one over (r, z, n); of other cells as it is."""
    return grad.roll(-(grad.shape[0] // 3), 0) if cell.is_gru else grad


def bias_gradients(cell: Cell, total: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of one direction's b_ih and b_hh, [G * H], in memory of their own.

    ``total`` is the sum of ``dg`` over steps and mini-batch.
    """
    if not cell.is_gru:
        return total, total.clone()
    hidden = len(total) // cell.gradients
    return total[hidden:].clone(), torch_order(cell, total[: 3 * hidden])
