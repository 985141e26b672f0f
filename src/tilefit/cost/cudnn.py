"""Which algorithm cuDNN runs a recurrent layer with."""

from __future__ import annotations

from tilefit.gpus import Gpu
from tilefit.ops import FORWARD, Recurrent

STANDARD = "STANDARD"
PERSIST_STATIC = "PERSIST_STATIC"
PERSIST_STATIC_SMALL_H = "PERSIST_STATIC_SMALL_H"
#: The largest hidden sizes of the small-hidden algorithm, forward and backward, by whether there is one gate.
_SMALL_HIDDEN = {True: (384, 256), False: (192, 128)}


def cudnn_algorithm(op: Recurrent, gpu: Gpu) -> tuple[str, str]:
    """The algorithm cuDNN runs a recurrent layer with, and the condition a persistent kernel misses.

    Returns:
        The algorithm's name, and for ``STANDARD`` the first condition of ``PERSIST_STATIC`` that fails
        (empty otherwise). Forward and backward choose separately.

    Source: ``get_algo`` in pytorch/pytorch ``aten/src/ATen/native/cudnn/RNN.cpp``. One deviation: PyTorch
    asks for the small-hidden algorithm in bf16 too, but on an H200 (cuDNN 9.19) bf16 layers ran one product
    and one pointwise kernel per time step at every size, so bf16 counts as standard here.
    """
    if op.proj_size:
        return STANDARD, "a projection (proj_size) is only in the standard algorithm"
    if op.packed:
        return STANDARD, "a PackedSequence has varying lengths"
    if op.dtype == "bf16":
        return STANDARD, "bf16: the persistent kernels are fp16 only"
    small = _SMALL_HIDDEN[op.gates == 1][op.direction != FORWARD]
    if op.dtype != "fp64" and gpu.compute_capability >= (6, 0) and op.hidden_size <= small:
        return PERSIST_STATIC_SMALL_H, ""
    failed = _failed_condition(op, gpu)
    return (STANDARD, failed) if failed else (PERSIST_STATIC, "")


def _failed_condition(op: Recurrent, gpu: Gpu) -> str:
    """The first condition of the persistent algorithm that a layer misses; empty if none."""
    conditions = (
        (op.dtype == "fp16", f"{op.dtype}: the persistent kernels are fp16 only"),
        (op.num_layers == 1, f"{op.num_layers} layers in one module: only a single layer can persist"),
        (not op.bidirectional, "two directions in one module: only a single direction can persist"),
        (op.hidden_size <= 1024, f"hidden size {op.hidden_size} exceeds 1024"),
        (op.hidden_size % 128 == 0, f"hidden size {op.hidden_size} is not a multiple of 128"),
        (op.input_size % 128 == 0, f"input size {op.input_size} is not a multiple of 128"),
        *(_before_ampere(op, gpu) if gpu.compute_capability < (8, 0) else _since_ampere(op, gpu)),
    )
    return next((missed for met, missed in conditions if not met), "")


def _before_ampere(op: Recurrent, gpu: Gpu) -> tuple[tuple[bool, str], ...]:
    batch, steps = op.batch, op.seq_len
    major, minor = gpu.compute_capability
    long = (steps >= 40 and batch <= 128) or (steps >= 20 and batch <= 96) or (steps >= 10 and batch <= 32)
    whole = (batch % 16 == 0 and batch not in (80, 112)) or batch == 8
    return (
        (major == 7, f"compute capability {major}.{minor} is below 7.0"),
        (minor == 0, "Turing never runs the persistent kernels"),
        (whole, f"batch {batch} is neither 8 nor a multiple of 16 other than 80 and 112"),
        (long, f"{steps} steps at batch {batch}: needs 40 steps up to 128, 20 up to 96, 10 up to 32"),
    )


def _since_ampere(op: Recurrent, gpu: Gpu) -> tuple[tuple[bool, str], ...]:
    batch, hidden = op.batch, op.hidden_size
    wide = op.gates == 1 and batch >= 96 and hidden >= 896
    return (
        (gpu.sms >= 98, f"{gpu.sms} SMs: the persistent kernels need 98"),
        (gpu.compute_capability[1] != 6, "compute capability 8.6 never runs the persistent kernels"),
        (op.mode != "GRU", "a GRU never persists on compute capability 8.0 and later"),
        (batch % 8 == 0, f"batch {batch} is not a multiple of 8"),
        (batch <= 128, f"batch {batch} exceeds 128"),
        (not wide, f"batch {batch} with hidden size {hidden}: needs a batch below 96 or hidden below 896"),
    )
