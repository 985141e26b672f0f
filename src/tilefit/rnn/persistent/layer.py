"""One layer's recurrence by the persistent kernels, with the signatures of :mod:`tilefit.rnn.reference`."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilefit.rnn.call import Call, allows_tf32
from tilefit.rnn.cells import CELLS, PIECE_BYTES, Backward, Cell, Forward, Grads, Rows
from tilefit.rnn.persistent.choice import chosen
from tilefit.rnn.persistent.launch import Kernel, capacity
from tilefit.rnn.persistent.variant import Problem

#: Element types of the kernels.
ELEMENTS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}

#: The kernels number the rows of a sequence, [T, B, D], in 32 bits; backward they name one step more.
MOST_ROWS = 2**31 - 1

#: Hidden size and mini-batch from which float32 is multiplied as TF32, where PyTorch's setting allows it.
#: Below, cuDNN was measured to make smaller errors than TF32 has: it multiplies so few rows in float32.
TF32_HIDDEN, TF32_BATCH = 128, 4


def refusal(call: Call) -> str | None:
    """Why the persistent kernels cannot run a call, whose tensors are on a CUDA device; None if they can."""
    dtype, hidden, batch, device = call.dtype, call.hidden, call.batch, call.device
    steps, directions = call.steps, call.directions
    assert device is not None
    if dtype not in ELEMENTS:
        return f"no kernel computes in {str(dtype).removeprefix('torch.')}"
    if not has_bindings():
        return "the package cuda-bindings is not installed (pip install cuda-bindings)"
    index = device.index if device.index is not None else torch.cuda.current_device()
    capability = torch.cuda.get_device_capability(index)
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} lacks the instructions; 8.0 has them"
    if (steps + 1) * batch * directions > MOST_ROWS:
        return (
            f"{steps} steps of {batch} rows in {directions} directions are more than the kernels can number"
        )
    sizes = _padded(hidden, dtype), batch, directions
    for backward_pass in (False, True) if call.training else (False,):
        layer = _problem(CELLS[call.cell], dtype, device, sizes, backward_pass, call.ragged, call.reset)
        if chosen(layer, capacity(index)) is None:
            ragged = ", with lengths or resets" if call.ragged or call.reset else ""
            return (
                f"the recurrent weights of hidden size {hidden} with mini-batch {batch} do not fit on the "
                f"chip ({'backward' if backward_pass else 'forward'}{ragged})"
            )
    return None


def _problem(
    cell: Cell,
    dtype: torch.dtype,
    device: torch.device,
    sizes: tuple[int, int, int],
    backward: bool,
    ragged: bool,
    reset: bool,
) -> Problem:
    """What a kernel is cut for: a pass of a layer of so many units (padded), rows and directions."""
    hidden, batch, _ = sizes
    small = hidden < TF32_HIDDEN or batch < TF32_BATCH
    strict = dtype is torch.float32 and (small or not allows_tf32(dtype, device))
    return Problem(cell, ELEMENTS[dtype], *sizes, backward, ragged, reset, strict)


def has_bindings() -> bool:
    """Whether the package is there that the kernels are compiled and launched through."""
    try:
        import cuda.bindings  # noqa: F401
    except ImportError:
        return False
    return True


def forward(
    cell: Cell, xg: Tensor, w_hh: Tensor, bias_n: Tensor | None, rows: Rows, *, save: bool
) -> Forward:
    """All time steps of one layer; see :func:`tilefit.rnn.reference.forward`. No initial state: zeros."""
    steps, batch, directions, _ = xg.shape
    hidden = w_hh.shape[-1]
    padded = _padded(hidden, xg.dtype)
    if padded != hidden:
        xg, w_hh = _widen_gates(xg, cell.gates, padded), _widen_weights(w_hh, cell.gates, padded)
        wide = forward(cell, xg, w_hh, _widen(bias_n, padded), _widen_states(rows, padded), save=save)
        parts = (1, 1, cell.saved, 1, 1)
        return Forward(*(_narrow(t, n, hidden) for t, n in zip(wide, parts, strict=True)))  # type: ignore[arg-type]
    kernel = _kernel_for(cell, xg, rows, (hidden, batch, directions), backward=False)
    out = xg.new_empty((steps, batch, directions, hidden))
    h_n = xg.new_empty((directions, batch, hidden))
    c_n = cells = gates = xg.new_empty(0)
    if cell.has_c:
        c_n = xg.new_empty((directions, batch, hidden))
    if save and cell.has_c:
        cells = xg.new_empty((steps, batch, directions, hidden), dtype=torch.float32)
    if save and cell.saved:
        gates = xg.new_empty((steps, batch, directions, cell.saved * hidden))
    _launch(
        kernel,
        {
            "projected": xg,
            "weights": w_hh,
            "bias_n": bias_n,
            "h0": rows.h0,
            "c0": rows.c0,
            "lengths": rows.lengths,
            "resets": rows.reset,
            "out": out,
            "gates": gates,
            "cells": cells,
            "last_hidden": h_n,
            "last_cell": c_n,
        },
        steps,
    )
    return Forward(out, c_n, gates, cells, h_n)


def backward(
    cell: Cell, grads: Grads, results: tuple[Tensor, Tensor | None, Tensor], w_hh: Tensor, rows: Rows
) -> Backward:
    """The gradients of one layer; see :func:`tilefit.rnn.reference.backward`. What is None is zeros."""
    out, gates, c = results
    steps, batch, directions, hidden = out.shape
    padded = _padded(hidden, out.dtype)
    if padded != hidden:
        w_hh = _widen_weights(w_hh, cell.gates, padded)
        gates = _widen_gates(gates, cell.saved, padded) if gates is not None and cell.saved else None
        grads = Grads(*(_widen(t, padded) for t in grads))
        results = _widen(out, padded), gates, _widen(c, padded) if cell.has_c else c
        wide = backward(cell, grads, results, w_hh, _widen_states(rows, padded))
        parts = (cell.gradients, 1, 1)
        return Backward(*(_narrow(t, n, hidden) for t, n in zip(wide, parts, strict=True)))
    kernel = _kernel_for(cell, out, rows, (hidden, batch, directions), backward=True)
    weights = w_hh.view(directions, cell.gates, hidden, hidden)
    if cell.is_gru:
        weights = weights.roll(1, 1)  # (r, z, n) to (n, r, z)
    grad_gates = out.new_empty((steps, batch, directions, cell.gradients * hidden))
    grad_h0 = out.new_empty((directions, batch, hidden))
    grad_c0 = out.new_empty((directions, batch, hidden) if cell.has_c else 0)
    _launch(
        kernel,
        {
            "grad_out": grads.out,
            "grad_last_h": grads.h_n,
            "grad_last_c": grads.c_n,
            "weights": weights.permute(0, 3, 1, 2),
            "out": out,
            "gates": gates,
            "cells": c,
            "h0": rows.h0,
            "first_cell": None if rows.c0 is None else rows.c0.float(),
            "lengths": rows.lengths,
            "resets": rows.reset,
            "grad_gates": grad_gates,
            "grad_h0": grad_h0,
            "grad_c0": grad_c0,
        },
        steps,
    )
    return Backward(grad_gates, grad_h0, grad_c0)


def _kernel_for(
    cell: Cell, like: Tensor, rows: Rows, sizes: tuple[int, int, int], *, backward: bool
) -> Kernel:
    """The kernel for a layer of so many units and directions and such a mini-batch, on a tensor's device."""
    uneven = rows.lengths is not None, rows.reset is not None
    return _kernel(_problem(cell, like.dtype, like.device, sizes, backward, *uneven), like.get_device())


@cache
def _kernel(problem: Problem, device: int) -> Kernel:
    variant = chosen(problem, capacity(device))
    if variant is None:
        raise ValueError(f"the kernels cannot run {problem}: ask refusal() first")
    return Kernel(problem, variant, device)


def _launch(kernel: Kernel, tensors: dict[str, Tensor | None], steps: int) -> None:
    """Launches with dense tensors, from where pieces of 16 bytes can be loaded: a view may begin anywhere."""
    for name, tensor in tensors.items():
        if tensor is not None and (not tensor.is_contiguous() or tensor.data_ptr() % PIECE_BYTES):
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
    kernel.launch(tensors, steps)


def _padded(hidden: int, dtype: torch.dtype) -> int:
    """The hidden size the kernels see: rows of whole 16-byte pieces."""
    elements = PIECE_BYTES // dtype.itemsize
    return -(-hidden // elements) * elements


def _widen(tensor: Tensor | None, padded: int) -> Any:
    """``[..., hidden]`` to ``[..., padded]``, with zeros."""
    return tensor if tensor is None else F.pad(tensor, (0, padded - tensor.shape[-1]))


def _widen_states(rows: Rows, padded: int) -> Rows:
    return rows._replace(h0=_widen(rows.h0, padded), c0=_widen(rows.c0, padded))


def _widen_gates(tensor: Tensor, gates: int, padded: int) -> Tensor:
    """``[..., gates * hidden]`` to ``[..., gates * padded]``."""
    wide: Tensor = _widen(tensor.view(*tensor.shape[:-1], gates, -1), padded)
    return wide.flatten(-2)


def _widen_weights(w_hh: Tensor, gates: int, padded: int) -> Tensor:
    """``[D, gates * hidden, hidden]`` to ``[D, gates * padded, padded]``."""
    extra = padded - w_hh.shape[-1]
    return F.pad(w_hh.view(len(w_hh), gates, -1, w_hh.shape[-1]), (0, extra, 0, extra)).flatten(1, 2)


def _narrow(tensor: Tensor, gates: int, hidden: int) -> Tensor:
    """The opposite of :func:`_widen_gates`; what is empty stays empty."""
    if tensor.numel() == 0:
        return tensor
    return tensor.view(*tensor.shape[:-1], gates, -1)[..., :hidden].flatten(-2)
