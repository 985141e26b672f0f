"""How many kernels cuDNN launches for a pass of a convolution.

Read off the kernels of 6,560 calls on an H200 (torch 2.11, cuDNN 9.19; ``benchmarks/launch_counts.py``), the
thresholds by half of the sizes. Kernels on Tensor Cores take NHWC and whole accesses of channels: what lies
otherwise is converted or padded before, and the result after. Small or narrow passes run as they lie.
"""

from __future__ import annotations

from math import prod

from tilefit.cost.gemm import kernels as product_kernels
from tilefit.cost.kernels import uses_tensor_cores
from tilefit.cost.tables import facts
from tilefit.cost.tiles import round_up
from tilefit.gpus import Gpu
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD
from tilefit.ops.conv import Conv
from tilefit.ops.dtypes import elements_per_access, size_bytes

#: Pixels that make whole accesses of so many bytes are multiplied as they lie, by a slower kernel than those
#: of 16 bytes, but by a single one.
PLAIN_ACCESS_BYTES = 8
#: What was found of the others, with the sources.
_KNOWN = facts("conv_kernels")


def is_plain_product(op: Conv, access_bytes: int = 16) -> bool:
    """Whether a convolution is a product of matrices as they lie in NCHW, whose rows are the pixels.

    On an H200, of 1 x 1 passes whose pixels make whole accesses the median took 0.94 (gradients of weights
    1.4) times as long as in NHWC, of others 2.5 to 3.3 times as long.
    """
    pixels = prod(op.input_size)
    aligned = pixels * size_bytes(op.dtype) % access_bytes == 0 or pixels == 1
    return not op.channels_last and _is_pointwise(op) and aligned


def kernels(op: Conv, gpu: Gpu) -> int:
    """Kernels of a pass without the one that adds a bias."""
    if op.is_narrow:
        return 1
    if not uses_tensor_cores(op.dtype, gpu):
        return _on_cuda_cores(op)
    pixels = prod(op.input_size)
    if is_plain_product(op, PLAIN_ACCESS_BYTES):
        return 1 + (op.direction == BACKWARD_WEIGHT and pixels > 1)  # the images' products are added
    split = op.direction == BACKWARD_WEIGHT and product_kernels(op.implicit_gemm, gpu) > 1
    ins, outs = (channels % elements_per_access(op.dtype) > 0 for channels in op.group_channels)
    if op.channels_last:
        return 1 + split + (ins + outs + (ins or outs)) * _is_padded(op, misaligned_input=ins)
    zeros = op.dtype == "tf32" and op.direction == BACKWARD_DATA
    if ins and _runs_as_it_lies(op):
        return 1 + zeros
    if outs and op.direction != FORWARD and op.flop < _KNOWN.few_outputs[op.dtype == "tf32"]:
        return 1
    if op.dtype == "tf32" and not outs and op.flop < _KNOWN.large_tf32[op.direction]:
        # Of the input and the filter; a gradient of the input needs its zeros; of the weights all in one.
        return {FORWARD: 3, BACKWARD_DATA: 2, BACKWARD_WEIGHT: 1}[op.direction]
    converted = sum(prod(sizes) > 1 for sizes in (op.input_size, op.kernel_size, op.output_size))
    return 1 + converted + split


def workspace_bytes(op: Conv, gpu: Gpu) -> int:
    """Memory of the copies that a pass makes of its images: converted, padded to whole accesses of channels.

    A forward pass of channels that make none took it on an H100, which was half of its peak.
    """
    if kernels(op, gpu) <= 2:
        return 0
    access = elements_per_access(op.dtype)
    padded_in, padded_out = (round_up(channels, access) / channels for channels in op.group_channels)
    return int(op.input_elements * padded_in + op.output_elements * padded_out) * size_bytes(op.dtype)


def _is_padded(op: Conv, misaligned_input: bool) -> bool:
    """Whether operands in NHWC whose channels make no whole accesses are padded: all but the few channels of
    a first layer, which have kernels of their own, and gradients of few weights."""
    if op.direction == FORWARD and misaligned_input:
        return op.group_channels[0] >= (2 if op.dtype == "tf32" else _KNOWN.converted[FORWARD][0])
    return op.direction != BACKWARD_WEIGHT or op.flop > _KNOWN.padded


def _runs_as_it_lies(op: Conv) -> bool:
    """Whether a pass in NCHW the channels of whose input make no whole accesses is not converted."""
    channels = op.group_channels[0]
    small = channels == 1 or prod(op.input_size) < _KNOWN.converted_pixels
    if op.dtype == "tf32" and op.direction == BACKWARD_WEIGHT:
        small = prod(op.kernel_size) <= _KNOWN.few_taps or op.flop < _KNOWN.padded
    most: float = _KNOWN.converted[op.direction][op.dtype == "tf32"]
    return small and channels < most


def _on_cuda_cores(op: Conv) -> int:
    """In fp32: a gradient of the input begins with zeros where the channels make whole accesses; operands in
    NHWC are converted, the output's if it has more than a pixel, all but the weights' gradient's."""
    ins, outs = (channels % elements_per_access(op.dtype) > 0 for channels in op.group_channels)
    zeros = op.direction == BACKWARD_DATA and not outs and not _is_pointwise(op)
    if not op.channels_last:
        return 1 + zeros
    if op.direction == BACKWARD_WEIGHT or (op.direction == FORWARD and ins):
        return 1
    whole = op.direction == FORWARD and not _is_pointwise(op) and prod(op.output_size) > 1
    return 3 + whole + 2 * zeros


def _is_pointwise(op: Conv) -> bool:
    return max(*op.kernel_size, *op.stride) == 1 and not max(op.padding)
