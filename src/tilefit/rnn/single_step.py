"""A single time step of an LSTM or a GRU by PyTorch's cell functions.

Training loops that call a layer one step at a time are limited by the host, which needs longer for a call of
cuDNN and its backward pass. In a CUDA graph, where that does not count, cuDNN is as fast.

The cell functions of these two compute in fp32 what lies between the products and the result; a plain RNN's
round in between, so that its errors in bf16 are several times cuDNN's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilefit.rnn.cells import Layers, Rows

_FUNCTIONS: dict[str, Any] = {"lstm": torch.lstm_cell, "gru": torch.gru_cell}


def run(
    layers: Layers, x: Tensor, flat: Sequence[Tensor], rows: Rows, dropout: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Layers one after another; arguments and results as of :func:`tilefit.rnn.functional.run`.

    Args:
        x: [1, B, I], in the element type of the computation, as are the states of ``rows``.
        dropout: Probability between layers, 0 outside training.
    """
    cell, depth, directions, kinds = layers
    h0, c0, _, reset = rows
    if not torch.is_autocast_enabled(x.device.type):  # which casts weights itself, and keeps what it cast
        flat = [weight if weight.dtype is x.dtype else weight.to(x.dtype) for weight in flat]
    mask = None if reset is None else reset.view(torch.bool).t()
    zeros = x.new_zeros((x.shape[1], flat[1].shape[1])) if h0 is None or (c0 is None and cell.has_c) else None

    def initial(state: Tensor | None, index: int) -> Tensor | None:
        if state is None:
            return zeros
        return state[index] if mask is None else state[index].masked_fill(mask, 0)

    step = x.squeeze(0)
    hidden: list[Tensor] = []
    cells: list[Tensor] = []
    for layer in range(depth):
        if layer and dropout:
            step = F.dropout(step, dropout)
        for index in range(layer * directions, (layer + 1) * directions):
            before: Any = initial(h0, index)
            if cell.has_c:
                before = before, initial(c0, index)
            found = _FUNCTIONS[cell.name](step, before, *flat[index * kinds : (index + 1) * kinds])
            h, *c = found if cell.has_c else (found,)
            hidden.append(h)
            cells += c
        step = hidden[-1] if directions == 1 else torch.cat(hidden[-2:], 1)
    # Copies: the output must not change when a final state is changed in place.
    return step.unsqueeze(0), torch.stack(hidden), torch.stack(cells) if cells else None
