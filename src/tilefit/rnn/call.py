"""What decides how a recurrent module's call runs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilefit.ops import BACKWARD_DATA, FORWARD, Recurrent
from tilefit.rnn.cells import CELLS

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


class Call(NamedTuple):
    """What decides how a recurrent module's call runs.

    Attributes:
        cell: Name of the cell.
        dtype: Element type of the computation.
        device: The CUDA device; None for any other.
        shapes_only: The tensors are on ``meta``: there are no values.
        input, hidden, batch, steps, layers, directions: Sizes.
        proj: ``proj_size`` of the module.
        ragged: Rows have lengths (or the input is a PackedSequence).
        reset: There is a mask of steps that start from zeros.
        training: Backward follows.
        cudnn_dtype: Element type that ``torch.nn`` computes in: under autocast on CUDA always fp16.
        tf32: fp32 products may use TF32.
        captured: The call becomes part of a CUDA graph, or warms up for that; see
            :func:`tilefit.rnn.dispatch.in_graph`.
    """

    cell: str
    dtype: torch.dtype
    device: torch.device | None
    shapes_only: bool
    input: int
    hidden: int
    batch: int
    steps: int
    layers: int
    directions: int
    proj: int
    ragged: bool
    reset: bool
    training: bool
    cudnn_dtype: torch.dtype
    tf32: bool
    captured: bool = False

    def op(self, *, backward: bool = False) -> Recurrent:
        """The call as ``torch.nn`` would run it."""
        return Recurrent(
            mode=CELLS[self.cell].mode,
            input_size=self.input,
            hidden_size=self.hidden,
            seq_len=self.steps,
            batch=self.batch,
            num_layers=self.layers,
            bidirectional=self.directions == 2,
            proj_size=self.proj,
            packed=self.ragged,
            dtype="tf32" if self.tf32 else DTYPES[self.cudnn_dtype],
            direction=BACKWARD_DATA if backward else FORWARD,
        )


def computed_dtype(x: Tensor) -> torch.dtype:
    """The element type a layer computes in and returns: the autocast region's, or else the input's."""
    if not torch._C._is_any_autocast_enabled() or x.dtype is torch.float64:
        return x.dtype
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def cuda_device(x: Tensor) -> torch.device | None:
    """The CUDA device of a tensor, None if it is not on one.

    A capture says of every tensor that it is on CUDA, so the tensor is asked what it is not.
    """
    return None if x.is_cpu or x.is_meta or not x.is_cuda else x.device


def allows_tf32(dtype: torch.dtype, device: torch.device | None) -> bool:
    """Whether products of that element type may use TF32: PyTorch's setting for cuDNN's recurrent layers."""
    return (
        dtype is torch.float32 and device is not None and torch.backends.cudnn.rnn.fp32_precision == "tf32"  # type: ignore[attr-defined]
    )
