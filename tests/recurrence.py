"""Recurrent layers to test with, and a loop over single steps to compare them with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tilefit.nn import GRU, LSTM, RNN
from tilefit.rnn.cells import Cell, Grads, Rows

CELLS: dict[str, tuple[type[nn.RNNBase], type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (LSTM, nn.LSTM, {}),
    "gru": (GRU, nn.GRU, {}),
    "rnn_tanh": (RNN, nn.RNN, {}),
    "rnn_relu": (RNN, nn.RNN, {"nonlinearity": "relu"}),
}


def pair(cell: str, *sizes: int, backend: str = "reference", **options: Any) -> tuple[Any, Any]:
    """Our module and torch's with the same weights, in fp64."""
    ours, theirs, kind = CELLS[cell]
    own = {name: options.pop(name) for name in ("recompute",) if name in options}
    torch_module = theirs(*sizes, dtype=torch.float64, **kind, **options)
    module = ours(*sizes, dtype=torch.float64, backend=backend, **kind, **options, **own)
    module.load_state_dict(torch_module.state_dict())
    return module, torch_module


def state(module: nn.RNNBase, batch: int) -> Any:
    """A random initial state that wants gradients."""
    rows = module.num_layers * (2 if module.bidirectional else 1)
    widths = (module.proj_size or module.hidden_size, module.hidden_size)
    tensors = [torch.randn(rows, batch, width, dtype=torch.float64, requires_grad=True) for width in widths]
    return tuple(tensors) if module.mode == "LSTM" else tensors[0]


def tensors(*trees: Any) -> list[Tensor]:
    """The tensors of outputs and states, flat."""
    return [
        leaf for tree in trees for leaf in (tensors(*tree) if isinstance(tree, (tuple, list)) else [tree])
    ]


def gradients(results: Iterable[Tensor], inputs: Iterable[Tensor]) -> list[Tensor]:
    """Gradients of a random, but always the same, weighted sum of the results."""
    generator = torch.Generator().manual_seed(7)
    inputs = list(inputs)
    total = 0 * sum(t.sum() for t in inputs)  # where no step runs, nothing else depends on them
    for result in results:
        total = total + (result * torch.randn(result.shape, generator=generator, dtype=torch.float64)).sum()
    return list(torch.autograd.grad(total, inputs))


def assert_same(found: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float = 1e-11) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def loop(
    module: nn.RNNBase, x: Tensor, hx: Any = None, lengths: Tensor | None = None, reset: Tensor | None = None
) -> tuple[Tensor, Any]:
    """What a time-first module computes, by ``torch.lstm_cell`` and its like for each row and step."""
    steps, batch, _ = x.shape
    cell = getattr(torch, f"{module.mode.lower()}_cell")
    directions = 2 if module.bidirectional else 1
    is_lstm = module.mode == "LSTM"
    hx = state_of_zeros(module, batch) if hx is None else hx
    rows: list[Tensor] = list(x.unbind(1))
    ends: list[list[Any]] = []
    for layer in range(module.num_layers):
        layer_rows = []
        for b, row in enumerate(rows):
            length = steps if lengths is None else int(lengths[b])
            outs = []
            for direction in range(directions):
                index = layer * directions + direction
                weights = [getattr(module, name) for name in module._all_weights[index]]
                first = [s[index, b : b + 1] for s in hx] if is_lstm else hx[index, b : b + 1]
                out = [row.new_zeros(module.hidden_size)] * steps
                for t in range(length) if direction == 0 else reversed(range(length)):
                    if reset is not None and reset[t, b]:
                        first = [torch.zeros_like(s) for s in first] if is_lstm else torch.zeros_like(first)
                    first = cell(row[t : t + 1], first, *weights)
                    out[t] = first[0][0] if is_lstm else first[0]
                outs.append(torch.stack(out))
                ends.append([index, b, first])
            layer_rows.append(torch.cat(outs, -1))
        rows = layer_rows
    ends.sort(key=lambda end: (end[0], end[1]))
    count = module.num_layers * directions

    def together(states: list[Tensor]) -> Tensor:
        return torch.cat(states).view(count, batch, -1)

    final = (
        (together([e[2][0] for e in ends]), together([e[2][1] for e in ends]))
        if is_lstm
        else together([e[2] for e in ends])
    )
    return torch.stack(rows, 1), final


def dense(rows: Rows, w_hh: Tensor, batch: int, cell: Cell) -> Rows:
    """Rows that the reference takes: their initial state is given."""
    zeros = w_hh.new_zeros(w_hh.shape[0], batch, w_hh.shape[2])
    h0, c0 = (zeros if given is None else given for given in rows[:2])
    return rows._replace(h0=h0, c0=c0 if cell.has_c else None)


def dense_grads(grads: Grads, out: Tensor, rows: Rows) -> Grads:
    """Gradients that the reference takes, of an output and final states like those of ``rows``."""
    likes = (out, rows.h0, rows.c0)
    given = [
        torch.zeros_like(t) if g is None and t is not None else g for g, t in zip(grads, likes, strict=True)
    ]
    return Grads(*given[: 2 if rows.c0 is None else 3])


def state_of_zeros(module: nn.RNNBase, batch: int) -> Any:
    rows = module.num_layers * (2 if module.bidirectional else 1)
    zeros = torch.zeros(rows, batch, module.hidden_size, dtype=torch.float64)
    return (zeros, zeros) if module.mode == "LSTM" else zeros
