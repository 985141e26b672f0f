"""Time of the sums over a batch and its pixels that are the gradients of convolutions' biases.

PyTorch's kernel for reductions cuts them up (``setReduceConfig`` of aten/src/ATen/native/cuda/Reduce.cuh): a
block's threads share the elements of a channel, or each of them has a channel of its own where channels lie
next to each other; many elements are shared by warps and then by blocks, the last of which adds up what the
others left. The constants were set to 2,059 sizes on an H100 (``benchmarks/conv_bias.py``); of 1,869 drawn
anew sums in NCHW are 4.6 % off in the median and in NHWC 10 %. One image alone, which the kernel reads
several elements at a time, was not used: its sums are told 1.6 times too long.
"""

from __future__ import annotations

from tilefit.cost.constants import constants
from tilefit.cost.memory import moved_s
from tilefit.cost.tiles import ceil_div
from tilefit.gpus import Gpu
from tilefit.ops import Streaming
from tilefit.ops.dtypes import size_bytes

#: ``Streaming.function`` of these sums.
SUMMED = "convolution_backward"
#: The kernel, and what blocks that share a channel add; clocks of a multiprocessor for an element, in NCHW
#: and in NHWC; of a thread for one after another, and for a part that another block left.
_KERNEL_S, _SHARED_S = 2.5e-6, 1.5e-6
_ELEMENT_CLOCKS, _VALUE_CLOCKS, _PART_CLOCKS = (0.44, 0.19), 18.0, 740.0
#: Threads of a block; elements of a channel that a thread has at least and at most; width of a warp.
_THREADS, _LEAST, _MOST, _WARP = 512, 16, 256, 32
#: Threads of a multiprocessor where they are not 2048 (CUDA C++ Programming Guide, compute capabilities).
_RESIDENT = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}


def summed_s(op: Streaming, gpu: Gpu) -> float:
    """Seconds that the sums of all channels take, which lie next to each other where they are ``strided``."""
    channels = max(1, op.write_bytes // size_bytes(op.dtype))
    summed = ceil_div(op.elements, channels)
    vector = next(each for each in (4, 2, 1) if channels % each == 0) if op.strided else 1
    threads, columns = _THREADS // vector, channels // vector
    inner, outer = (columns, summed) if op.strided else (summed, columns)
    width = min(_power_of_2(inner), _WARP)
    height = min(_power_of_2(outer), threads // width)
    width = min(_power_of_2(inner), threads // height)
    values = summed if op.strided else ceil_div(summed, width)
    blocks = ceil_div(columns, width if op.strided else 1)
    parts = 1
    if values >= min(_LEAST * height, _MOST):
        values = ceil_div(values, height)
        resident = gpu.sms * (_RESIDENT.get(gpu.compute_capability, 2048) // (width * height))
        if values >= _MOST and blocks <= resident:
            parts = max(min(ceil_div(resident, blocks), ceil_div(values, _LEAST)), ceil_div(values, _MOST))
            values = ceil_div(values, parts)
    else:
        blocks = ceil_div(blocks, height)
    units = ceil_div(blocks * parts, gpu.sms) * width * height * vector  # of the fullest multiprocessor
    clocks = values * max(_VALUE_CLOCKS, units * _ELEMENT_CLOCKS[op.strided])
    if parts > 1:
        clocks += ceil_div(parts, height if op.strided else width * height) * _PART_CLOCKS
    time_s = _KERNEL_S + _SHARED_S * (parts > 1) + clocks / gpu.boost_clock_hz
    return max(time_s, moved_s(op.moved_bytes, gpu, constants(gpu)))


def _power_of_2(size: int) -> int:
    """The largest that is no larger."""
    return 1 << size.bit_length() - 1
