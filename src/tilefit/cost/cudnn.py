"""Which algorithm cuDNN runs a recurrent layer with."""

from __future__ import annotations

from tilefit.gpus import Gpu
from tilefit.ops import FORWARD, Recurrent

STANDARD = "STANDARD"
PERSIST_STATIC = "PERSIST_STATIC"
PERSIST_STATIC_SMALL_H = "PERSIST_STATIC_SMALL_H"


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
    if op.dtype != "fp64" and gpu.compute_capability >= (6, 0) and op.hidden_size <= _small_hidden(op):
        return PERSIST_STATIC_SMALL_H, ""
    failed = _failed_condition(op, gpu)
    return (STANDARD, failed) if failed else (PERSIST_STATIC, "")


def _small_hidden(op: Recurrent) -> int:
    """The largest hidden size of the small-hidden algorithm."""
    if op.gates == 1:
        return 384 if op.direction == FORWARD else 256
    return 192 if op.direction == FORWARD else 128


def _failed_condition(op: Recurrent, gpu: Gpu) -> str:
    """The first condition of the persistent algorithm that a layer misses; empty if none."""
    if op.dtype != "fp16":
        return f"{op.dtype}: the persistent kernels are fp16 only"
    if op.num_layers > 1:
        return f"{op.num_layers} layers in one module: only a single layer can persist"
    if op.bidirectional:
        return "two directions in one module: only a single direction can persist"
    if op.hidden_size > 1024:
        return f"hidden size {op.hidden_size} exceeds 1024"
    if op.hidden_size % 128:
        return f"hidden size {op.hidden_size} is not a multiple of 128"
    if op.input_size % 128:
        return f"input size {op.input_size} is not a multiple of 128"
    return _failed_device_condition(op, gpu)


def _failed_device_condition(op: Recurrent, gpu: Gpu) -> str:
    batch, steps = op.batch, op.seq_len
    major, minor = gpu.compute_capability
    if major == 7:
        if minor != 0:
            return "Turing never runs the persistent kernels"
        if not ((batch % 16 == 0 and batch not in (80, 112)) or batch == 8):
            return f"batch {batch} is neither 8 nor a multiple of 16 other than 80 and 112"
        if (steps >= 40 and batch <= 128) or (steps >= 20 and batch <= 96) or (steps >= 10 and batch <= 32):
            return ""
        return f"{steps} steps at batch {batch}: needs 40 steps up to 128, 20 up to 96, 10 up to 32"
    if major < 8:
        return f"compute capability {major}.{minor} is below 7.0"
    if gpu.sms < 98:
        return f"{gpu.sms} SMs: the persistent kernels need 98"
    if minor == 6:
        return "compute capability 8.6 never runs the persistent kernels"
    if op.mode == "GRU":
        return "a GRU never persists on compute capability 8.0 and later"
    if batch % 8:
        return f"batch {batch} is not a multiple of 8"
    if batch > 128:
        return f"batch {batch} exceeds 128"
    if op.gates == 1 and batch >= 96 and op.hidden_size >= 896:
        return f"batch {batch} with hidden size {op.hidden_size}: needs a batch below 96 or hidden below 896"
    return ""
