"""One layer's recurrence by the persistent kernels, with the signatures of :mod:`tilefit.rnn.reference`."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tilefit.rnn.cells import Backward, Cell, Forward
from tilefit.rnn.dispatch import allows_tf32
from tilefit.rnn.persistent.choice import chosen
from tilefit.rnn.persistent.launch import Kernel, capacity
from tilefit.rnn.persistent.variant import Problem

#: Element types of the kernels; float32 is multiplied as TF32, as cuDNN does by default.
ELEMENTS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def refusal(
    device: torch.device,
    cell: Cell,
    dtype: torch.dtype,
    hidden: int,
    batch: int,
    directions: int,
    *,
    training: bool,
) -> str | None:
    """Why the persistent kernels cannot run this layer, or None where they can."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}, and the kernels are for CUDA"
    if dtype not in ELEMENTS:
        return f"no kernel computes in {str(dtype).removeprefix('torch.')}"
    if dtype is torch.float32 and not allows_tf32(dtype, device):
        return "float32 is multiplied as TF32, which PyTorch's setting for recurrent layers forbids"
    if not _has_bindings():
        return "the package cuda-bindings is not installed (pip install 'tilefit[rnn]')"
    index = device.index if device.index is not None else torch.cuda.current_device()
    capability = torch.cuda.get_device_capability(index)
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} lacks the instructions; 8.0 has them"
    kinds = (False, True) if training else (False,)
    for backward_pass in kinds:
        problem = Problem(cell, ELEMENTS[dtype], _padded(hidden, dtype), batch, directions, backward_pass)
        if chosen(problem, capacity(index)) is None:
            return (
                f"the recurrent weights of hidden size {hidden} with mini-batch {batch} do not fit on the "
                f"chip ({'backward' if backward_pass else 'forward'})"
            )
    return None


def _has_bindings() -> bool:
    try:
        import cuda.bindings  # noqa: F401
    except ImportError:
        return False
    return True


def forward(
    cell: Cell,
    xg: Tensor,
    w_hh: Tensor,
    bias_n: Tensor | None,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    reset: Tensor | None,
    *,
    save: bool,
) -> Forward:
    """All time steps of one layer; see :func:`tilefit.rnn.reference.forward`. No initial state: zeros."""
    steps, batch, directions, _ = xg.shape
    hidden = w_hh.shape[-1]
    padded = _padded(hidden, xg.dtype)
    kernel = _kernel(
        cell,
        xg.dtype,
        (padded, batch, directions),
        (False, lengths is not None, reset is not None),
        xg.get_device(),
    )
    xg, w_hh = _widen_gates(xg, cell.gates, hidden, padded), _widen_weights(w_hh, cell.gates, hidden, padded)
    out = _unwritten(xg, (steps, batch, directions, padded))
    keep = save and cell.saved > 0
    gates = xg.new_empty((steps, batch, directions, cell.saved * padded if keep else 0))
    cells = xg.new_empty(
        (steps, batch, directions, padded if save and cell.has_c else 0), dtype=torch.float32
    )
    h_n = xg.new_empty((directions, batch, padded))
    c_n = torch.empty_like(h_n) if cell.has_c else xg.new_empty(0)
    _launch(
        kernel,
        {
            "projected": xg,
            "weights": w_hh,
            "bias_n": _widen(bias_n, padded),
            "h0": _widen(h0, padded),
            "c0": _widen(c0, padded),
            "lengths": lengths,
            "resets": reset,
            "out": out,
            "gates": gates if keep else None,
            "cells": cells if save and cell.has_c else None,
            "last_hidden": h_n,
            "last_cell": c_n if cell.has_c else None,
        },
        steps,
    )
    return Forward(
        _narrow(out, 1, padded, hidden),
        _narrow(c_n, 1, padded, hidden) if cell.has_c else c_n,
        _narrow(gates, cell.saved, padded, hidden) if keep else gates,
        _narrow(cells, 1, padded, hidden) if save and cell.has_c else cells,
        _narrow(h_n, 1, padded, hidden),
    )


def backward(
    cell: Cell,
    grad_out: Tensor | None,
    grad_hn: Tensor | None,
    grad_cn: Tensor | None,
    results: tuple[Tensor, Tensor, Tensor],
    w_hh: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    reset: Tensor | None,
) -> Backward:
    """The gradients of one layer; see :func:`tilefit.rnn.reference.backward`. What is None is zeros."""
    out, gates, c = results
    steps, batch, directions, hidden = out.shape
    padded = _padded(hidden, out.dtype)
    kernel = _kernel(
        cell,
        out.dtype,
        (padded, batch, directions),
        (True, lengths is not None, reset is not None),
        out.get_device(),
    )
    weights = _widen_weights(w_hh, cell.gates, hidden, padded).view(directions, cell.gates, padded, padded)
    if cell.is_gru:
        weights = weights.roll(1, 1)  # (r, z, n) to (n, r, z)
    weights = weights.permute(0, 3, 1, 2).contiguous()
    grad_gates = _unwritten(out, (steps, batch, directions, cell.gradients * padded))
    grad_h0 = out.new_empty((directions, batch, padded))
    grad_c0 = out.new_empty((directions, batch, padded if cell.has_c else 0))
    _launch(
        kernel,
        {
            "grad_out": _widen(grad_out, padded),
            "grad_last_h": _widen(grad_hn, padded),
            "grad_last_c": _widen(grad_cn, padded) if cell.has_c else None,
            "weights": weights,
            "out": _widen(out, padded),
            "gates": _widen_gates(gates, cell.saved, hidden, padded) if cell.saved else None,
            "cells": _widen(c, padded) if cell.has_c else None,
            "h0": _widen(h0, padded),
            "first_cell": None if c0 is None else _widen(c0.float(), padded),
            "lengths": lengths,
            "resets": reset,
            "grad_gates": grad_gates,
            "grad_h0": grad_h0,
            "grad_c0": grad_c0 if cell.has_c else None,
        },
        steps,
    )
    return Backward(
        _narrow(grad_gates, cell.gradients, padded, hidden),
        _narrow(grad_h0, 1, padded, hidden),
        _narrow(grad_c0, 1, padded, hidden) if cell.has_c else grad_c0,
    )


@cache
def _kernel(
    cell: Cell, dtype: torch.dtype, sizes: tuple[int, int, int], options: tuple[bool, bool, bool], device: int
) -> Kernel:
    """The kernel for hidden size, mini-batch and directions, and for backward, lengths and resets."""
    problem = Problem(cell, ELEMENTS[dtype], *sizes, *options)
    variant = chosen(problem, capacity(device))
    if variant is None:
        raise ValueError(f"the kernels cannot run {problem}: ask refusal() first")
    return Kernel(problem, variant, device)


def _launch(kernel: Kernel, tensors: dict[str, Tensor | None], steps: int) -> None:
    kernel.launch({name: None if t is None else t.contiguous() for name, t in tensors.items()}, steps)


def _padded(hidden: int, dtype: torch.dtype) -> int:
    """The hidden size the kernels see: rows of whole 16-byte pieces."""
    elements = 16 // dtype.itemsize
    return -(-hidden // elements) * elements


def _unwritten(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor in which no word has been written yet; see ``common.cuh``."""
    empty = like.new_empty(shape)
    empty.view(torch.int32).fill_(-1)
    return empty


def _widen(tensor: Tensor | None, padded: int) -> Tensor | None:
    if tensor is None or tensor.shape[-1] == padded:
        return tensor
    return torch.nn.functional.pad(tensor, (0, padded - tensor.shape[-1]))


def _widen_gates(tensor: Tensor, gates: int, hidden: int, padded: int) -> Tensor:
    """``[..., gates * hidden]`` to ``[..., gates * padded]``, with zeros."""
    if hidden == padded:
        return tensor
    split = tensor.view(*tensor.shape[:-1], gates, hidden)
    return torch.nn.functional.pad(split, (0, padded - hidden)).flatten(-2)


def _widen_weights(w_hh: Tensor, gates: int, hidden: int, padded: int) -> Tensor:
    """``[D, gates * hidden, hidden]`` to ``[D, gates * padded, padded]``, with zeros."""
    if hidden == padded:
        return w_hh
    extra = padded - hidden
    split = w_hh.view(-1, gates, hidden, hidden)
    return torch.nn.functional.pad(split, (0, extra, 0, extra)).flatten(1, 2)


def _narrow(tensor: Tensor, gates: int, padded: int, hidden: int) -> Tensor:
    """The opposite of :func:`_widen_gates`."""
    if hidden == padded:
        return tensor
    return tensor.view(*tensor.shape[:-1], gates, padded)[..., :hidden].flatten(-2)
