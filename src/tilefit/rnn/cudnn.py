"""cuDNN's recurrence inside the operator, where ``torch.nn``'s own call cannot be traced.

Eager code makes ``torch.nn``'s call instead. cuDNN saves a buffer whose size only it knows, which an operator
cannot return to a compiler; so backward runs the forward pass again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilefit.rnn.cells import Cell, Joined

#: cuDNN's numbers of the cells (``cudnnRNNMode_t``).
MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


def _weights(joined: Joined) -> tuple[list[Tensor], int]:
    """Weights in the order cuDNN wants them, and how many a direction has."""
    kinds = [weight for weight in joined if weight is not None]
    return [kind[d] for d in range(len(kinds[0])) for kind in kinds], len(kinds)


def _run(
    cell: Cell, x: Tensor, weights: list[Tensor], stride: int, h0: Tensor, c0: Tensor | None, train: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return torch.ops.aten._cudnn_rnn(  # type: ignore[no-any-return]
        x, weights, stride, None, h0, c0, MODES[cell.name], h0.shape[-1], 0, 1, False, 0.0, train,
        h0.shape[0] == 2, [], None,
    )  # fmt: skip


def _state(x: Tensor, w_hh: Tensor, state: Tensor | None) -> Tensor:
    return x.new_zeros((w_hh.shape[0], x.shape[1], w_hh.shape[-1])) if state is None else state


def forward(
    cell: Cell, x: Tensor, joined: Joined, h0: Tensor | None, c0: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [T, B, D, H] and final states, as :func:`tilefit.rnn.operator.recurrent` returns them."""
    h0, c0 = _state(x, joined.w_hh, h0), _state(x, joined.w_hh, c0) if cell.has_c else None
    weights, stride = _weights(joined)
    output, h_n, c_n, _, _ = _run(cell, x.contiguous(), weights, stride, h0, c0, False)
    return output.view(*x.shape[:2], h0.shape[0], -1), h_n, c_n if cell.has_c else x.new_empty(0)


def backward(
    cell: Cell,
    grads: tuple[Tensor, Tensor, Tensor | None],
    x: Tensor,
    joined: Joined,
    h0: Tensor | None,
    c0: Tensor | None,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of x, w_ih, w_hh, b_ih, b_hh, h0 and c0; None where not needed."""
    h0, c0 = _state(x, joined.w_hh, h0), _state(x, joined.w_hh, c0) if cell.has_c else None
    x, (grad_out, grad_hn, grad_cn) = x.contiguous(), grads
    weights, stride = _weights(joined)
    output, _, _, reserve, buffer = _run(cell, x, weights, stride, h0, c0, True)
    grad_x, grad_h0, grad_c0, grad_weights = torch.ops.aten._cudnn_rnn_backward(
        x, weights, stride, buffer, h0, c0, output, grad_out.flatten(2), grad_hn, grad_cn, MODES[cell.name],
        h0.shape[-1], 0, 1, False, 0.0, True, h0.shape[0] == 2, [], None, reserve,
        [True, True, cell.has_c, any(needs[1:5])],
    )  # fmt: skip
    stacked = [torch.stack(grad_weights[kind::stride]) if any(needs[1:5]) else None for kind in range(stride)]
    found = [grad_x, *stacked, *[None] * (4 - stride), grad_h0, grad_c0]
    return [grad if needed else None for grad, needed in zip(found, needs, strict=True)]
