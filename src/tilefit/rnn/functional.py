"""Recurrent layers as functions: :func:`lstm`, :func:`gru`, :func:`rnn`.

They compute what ``torch.nn.LSTM``, ``GRU`` and ``RNN`` compute, from weights given with the call, for one
layer or a stack, in one direction or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from tilefit.cost.recurrent_times import CUDNN
from tilefit.errors import UsageError
from tilefit.rnn import single_step, stack, torch_nn
from tilefit.rnn.call import Call, allows_tf32, computed_dtype, cuda_device
from tilefit.rnn.cells import CELLS, Cell, Layers, Rows
from tilefit.rnn.dispatch import CELL, choose, in_graph
from tilefit.rnn.operator import is_traced, recurrent

#: Weights of one direction of one layer: w_ih, w_hh and, with bias, b_ih and b_hh, as in ``torch.nn.LSTM``.
Weights = Sequence[Tensor]


class Options(TypedDict, total=False):
    """Keyword arguments of every function here.

    Attributes:
        bidirectional: Every layer has two directions. (False)
        lengths: Steps of each row, int[B]; None: all T. The output beyond them is 0.
        reset: bool[T, B]: True where the state is zero before the step, in both directions.
        dropout: Probability with which an element between layers is zeroed. (0.0)
        training: Dropout applies. (False)
        recompute: Save no gates for backward, compute them again. (False)
        backend: ``persistent``, ``cudnn``, ``cell`` or ``reference``; None: the fastest.
    """

    bidirectional: bool
    lengths: Tensor | None
    reset: Tensor | None
    dropout: float
    training: bool
    recompute: bool
    backend: str | None


class Settings(NamedTuple):
    """How layers run; see :class:`Options`."""

    dropout: float = 0.0
    training: bool = False
    recompute: bool = False
    backend: str | None = None


def lstm(
    input: Tensor,
    weights: Sequence[Weights],
    hx: tuple[Tensor, Tensor] | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Run an LSTM over a sequence.

    Args:
        input: [T, B, I]
        weights: Per layer (and per direction, forward first) w_ih [4 * H, I], w_hh [4 * H, H] and maybe b_ih
            and b_hh [4 * H], gates in the order i, f, g, o: ``torch.nn.LSTM.all_weights``.
        hx: Initial hidden and cell state, each [layers * D, B, H]; None for zeros.
        **options: See :class:`Options`.

    Returns:
        Output [T, B, D * H] and final states, each [layers * D, B, H].

    Raises:
        UsageError: a shape does not fit.
        TilefitError: the backend asked for cannot run it.
    """
    h0, c0 = hx if hx is not None else (None, None)
    out, h_n, c_n = _run(CELLS["lstm"], input, weights, h0, c0, **options)
    assert c_n is not None
    return out, (h_n, c_n)


def gru(
    input: Tensor, weights: Sequence[Weights], hx: Tensor | None = None, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    """Run a GRU over a sequence: as :func:`lstm`, with three gates in the order r, z, n and no cell state."""
    return _run(CELLS["gru"], input, weights, hx, None, **options)[:2]


def rnn(
    input: Tensor,
    weights: Sequence[Weights],
    hx: Tensor | None = None,
    *,
    nonlinearity: str = "tanh",
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    """Run an Elman RNN (``tanh`` or ``relu``) over a sequence: as :func:`lstm`, without gates."""
    if nonlinearity not in ("tanh", "relu"):
        raise UsageError(f"unknown nonlinearity {nonlinearity!r}", hint="Use tanh or relu.")
    return _run(CELLS[f"rnn_{nonlinearity}"], input, weights, hx, None, **options)[:2]


def _run(
    cell: Cell,
    x: Tensor,
    weights: Sequence[Weights],
    h0: Tensor | None,
    c0: Tensor | None,
    *,
    bidirectional: bool = False,
    lengths: Tensor | None = None,
    reset: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    directions, how = 2 if bidirectional else 1, Settings(**settings)
    _check(cell, x, weights, h0, c0, directions)
    lengths, reset = check_rows(x, lengths, reset)
    flat = [weight for ws in weights for weight in ws]
    layers = Layers(cell, len(weights) // directions, directions, 4 if len(weights[0]) > 2 else 2)
    call = None
    if not torch.compiler.is_compiling():
        ragged, has_reset = lengths is not None, reset is not None
        call = describe(layers, x, x.shape[:2], flat, (h0, c0), ragged=ragged, reset=has_reset)
        call = in_graph(call, how.backend)
        how = how._replace(backend=choose(call, how.backend).backend)
    return run(layers, x, flat, Rows(h0, c0, lengths, reset), how, call)


def describe(
    layers: Layers,
    x: Tensor,
    sizes: Sequence[int],
    flat: Sequence[Tensor],
    states: Sequence[Tensor | None],
    *,
    ragged: bool,
    reset: bool,
    proj: int = 0,
) -> Call:
    """What decides how a call runs; ``sizes`` are steps and mini-batch, features x's last dimension."""
    steps, batch = sizes
    dtype = computed_dtype(x)
    device = cuda_device(x)
    hidden, tensors = flat[0].shape[0] // layers.cell.gates, (x, *states, *flat)
    numbers = x.shape[-1], hidden, batch, steps, layers.depth, layers.directions, proj
    training = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    by_cudnn = torch.float16 if dtype is not x.dtype and device is not None else dtype
    how = training, by_cudnn, allows_tf32(dtype, device)
    return Call(layers.cell.name, dtype, device, x.is_meta, *numbers, ragged, reset, *how)


def run(
    layers: Layers, x: Tensor, flat: Sequence[Tensor], rows: Rows, how: Settings, call: Call | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Layers one after another by a backend.

    Args:
        layers: What they are.
        x: [T, B, I]
        flat: Their weights.
        rows: Initial states [layers * D, B, H] or None; lengths and resets as of
            :func:`check_rows`.
        how: With the backend of ``call``; in compiled code with one that has to run it, or None: the operator
            chooses then.
        call: What :func:`describe` returned; None in compiled code.

    Returns:
        Output [T, B, D * H]; final hidden and cell states [layers * D, B, H], the latter empty or None if the
        cell has none.
    """
    backend = how.backend
    if backend == CUDNN and call is not None:
        return torch_nn.run(layers, x, flat, rows, how.dropout, how.training)
    dropout = how.dropout if how.training else 0.0
    dtype = computed_dtype(x)
    x = x if x.dtype is dtype else x.to(dtype)
    h0, c0 = (s if s is None or s.dtype is dtype else s.to(dtype) for s in rows[:2])
    rows = Rows(h0, c0, rows.lengths, rows.reset)
    transformed = torch._C._are_functorch_transforms_active()
    if call is not None and backend == CELL and not transformed:
        return single_step.run(layers, x, flat, rows, dropout)
    if call is not None and not is_traced() and not transformed:
        options: Any = {"recompute": how.recompute, "backend": backend or "", "training": call.training}
        return stack.run(layers, x, flat, rows, dropout=dropout, **options)

    def layer(x: Tensor, weights: Sequence[Tensor], rows: Rows) -> Any:
        return recurrent(x, weights, rows, layers=layers, recompute=how.recompute, backend=backend or "")

    def between(x: Tensor, index: int) -> Tensor:
        return F.dropout(x, dropout) if dropout else x

    return stack.one_by_one(layer, between, x, flat, rows, layers.depth)


def _check(
    cell: Cell, x: Tensor, weights: Sequence[Weights], h0: Tensor | None, c0: Tensor | None, directions: int
) -> None:
    """Raise UsageError if sizes do not fit each other."""
    if x.dim() != 3 or x.shape[0] == 0 or x.shape[1] == 0:
        raise UsageError(
            f"the input is {list(x.shape)}", hint="Give [steps, batch, features], none of them 0."
        )
    if not weights or len(weights) % directions:
        raise UsageError(f"{len(weights)} sets of weights for {directions} direction(s) a layer")
    hidden = weights[0][1].shape[-1]
    rows = cell.gates * hidden
    width = x.shape[2]
    for index, ws in enumerate(weights):
        if index == directions:
            width = directions * hidden
        expected = [(rows, width), (rows, hidden), (rows,), (rows,)][: 4 if len(weights[0]) > 2 else 2]
        found = [tuple(w.shape) for w in ws]
        if found != expected:
            raise UsageError(
                f"the weights are {found}, a {cell.mode} of {hidden} units needs {expected}",
                where=f"weights[{index}]",
            )
    state = (len(weights), x.shape[1], hidden)
    for name, given in (("h0", h0), ("c0", c0)):
        if given is not None and tuple(given.shape) != state:
            raise UsageError(f"{name} is {list(given.shape)}", hint=f"Give {list(state)}.")


def check_rows(
    x: Tensor, lengths: Tensor | None, reset: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Lengths as int32[B] and reset as uint8[T, B], beside x, which is [T, B, I].

    Raises:
        UsageError: a shape does not fit, or a length on the host is not within 0 and T.
    """
    steps, batch, _ = x.shape
    if lengths is not None:
        if not isinstance(lengths, Tensor):
            raise UsageError(
                f"lengths is a {type(lengths).__name__}", hint=f"Give a tensor of integers [{batch}]."
            )
        if lengths.shape != (batch,) or lengths.is_floating_point():
            raise UsageError(
                f"lengths is {lengths.dtype}{list(lengths.shape)}", hint=f"Give integers [{batch}]."
            )
        read = lengths.is_cpu and not torch.compiler.is_compiling()
        if read and not bool(((lengths >= 0) & (lengths <= steps)).all()):
            raise UsageError(f"lengths must be within 0 and {steps}")
        lengths = lengths.to(x.device, torch.int32, non_blocking=True).contiguous()
    if reset is not None:
        if reset.shape != (steps, batch):
            raise UsageError(f"reset is {list(reset.shape)}", hint=f"Give [{steps}, {batch}]: steps, batch.")
        reset = reset if reset.dtype is torch.bool else reset != 0
        reset = reset.to(x.device).contiguous().view(torch.uint8)
    return lengths, reset
