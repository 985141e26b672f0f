"""Time of a convolution as an implicit matrix product."""

from __future__ import annotations

from dataclasses import replace

from tilefit.cost.constants import Constants
from tilefit.cost.estimate import Estimate, from_datasheet
from tilefit.cost.gemm import schedule
from tilefit.cost.kernels import SIMT, Kernel, select, uses_tensor_cores
from tilefit.cost.memory import floor_s, rate_bytes_per_s
from tilefit.cost.tiles import round_up
from tilefit.gpus import Gpu
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, Conv
from tilefit.ops.dtypes import LINE_BYTES, elements_per_access, size_bytes

#: A tile that is narrow in channels reuses each gathered pixel less: exponent of the tile's area, in place
#: of the products' own. From 64 -> 64 channels (406 TFLOP/s) against 256 -> 256 (728 TFLOP/s) on an H200.
_SMALL_TILE_EXPONENT = 0.9
#: fp32 convolutions of 3 x 3 and 5 x 5 at stride 1 run by Winograd's algorithm: how much faster than the
#: implicit product (DeepBench's V100 and T4, median of 29 layers), and the most it can save (F(2x2, 3x3)).
_WINOGRAD_KERNELS = (3, 5)
_WINOGRAD_SPEEDUP = 1.7
_WINOGRAD_LIMIT = 2.25
#: A strided data gradient does not skip all the taps that meet no pixel (between the medians of
#: DeepBench's fp16 and fp32 layers on V100 and T4).
_STRIDED_GRADIENT_FACTOR = 1.25
#: Share of the bandwidth at which cuDNN converts between layouts, NCHW to NHWC and back: each activation is
#: read and written once. Aligned channels in NCHW; misaligned in NCHW; misaligned in NHWC (padded copies).
#: From the extra time of six 3 x 3 layers on an H200 (PyTorch 2.11, cuDNN 9.19).
_CONVERSION_SHARE = 0.45
_MISALIGNED_NCHW_SHARE = 0.32
_MISALIGNED_NHWC_SHARE = 0.27
#: The first layers' kernels gather channels one by one: FLOP per clock and SM that remain, counted on the
#: channels padded to a full access, forward and for the weight gradient; the gathers hide the prologue.
#: From 3, 4 and 8 channels at the input of ResNet, VGG, MobileNet and ViT on an H200, which all take nearly
#: the same time (``benchmarks/first_convolution.py``).
_FEW_CHANNELS_FLOP_PER_CLOCK_PER_SM = 420.0
_FEW_CHANNELS_WEIGHT_GRADIENT = 670.0
#: Channels per group from which the grouped kernels use Tensor Cores.
_TENSOR_CORE_GROUP = 8
#: Depthwise and narrow grouped kernels on CUDA cores: share of the bandwidth, and of the fp32 peak. Typical
#: values, to be replaced by a calibration; hence their wide interval.
_DEPTHWISE_BANDWIDTH_SHARE = {True: 0.45, False: 0.6}
_DEPTHWISE_WEIGHT_GRADIENT_FACTOR = 3.0
_DEPTHWISE_MATH_SHARE = 0.25
_SPREAD = 0.4
_DEPTHWISE_SPREAD = 1.0


def estimate_conv(op: Conv, gpu: Gpu, constants: Constants) -> Estimate:
    """Predicted time of a convolution pass."""
    narrow = op.groups > 1 and min(op.in_channels, op.out_channels) // op.groups < _TENSOR_CORE_GROUP
    if narrow:
        return _depthwise(op, gpu, constants)
    access = elements_per_access(op.dtype)
    channels = (op.in_channels // op.groups, op.out_channels // op.groups)
    tensor_cores = uses_tensor_cores(op.dtype, gpu)
    conversion_s = 0.0
    tile_constants = constants
    limit = speedup = 1.0
    if not tensor_cores:
        product = op.implicit_gemm
        kernel = select(product, gpu)
        reason = kernel.reason
        if _runs_winograd(op):
            limit, speedup = _WINOGRAD_LIMIT, _WINOGRAD_SPEEDUP
            reason += ", by Winograd's algorithm"
    else:
        padded = replace(
            op,
            in_channels=round_up(channels[0], access) * op.groups,
            out_channels=round_up(channels[1], access) * op.groups,
        )
        product = padded.implicit_gemm
        # The padded product is aligned; what misalignment costs is the copies around it.
        kernel = select(replace(product, m=round_up(product.m, 64), k=round_up(product.k, 64)), gpu)
        kernel = Kernel(kernel.family, 0.0, 1.0, 1.0, "", LINE_BYTES, "")
        few = channels[0] < access
        misaligned = any(c % access for c in channels)
        if not op.channels_last:
            share = _MISALIGNED_NCHW_SHARE if misaligned else _CONVERSION_SHARE
            reason = "NCHW in memory: cuDNN converts to NHWC and back around the Tensor Core kernel"
        elif misaligned and not few:
            share = _MISALIGNED_NHWC_SHARE
            reason = f"channels {channels[0]} -> {channels[1]} are not multiples of {access}: padded copies"
        else:
            share = 0.0
            reason = "implicit matrix product in NHWC"
        if share:
            activations = (op.input_elements + op.output_elements) * size_bytes(op.dtype)
            conversion_s = 2 * activations / (gpu.memory_bandwidth_bytes_per_s * share)
        tile_constants = replace(constants, small_tile_exponent=_SMALL_TILE_EXPONENT)
        if channels[0] <= access and op.groups == 1:
            weight_gradient = op.direction == BACKWARD_WEIGHT
            rate = _FEW_CHANNELS_WEIGHT_GRADIENT if weight_gradient else _FEW_CHANNELS_FLOP_PER_CLOCK_PER_SM
            kernel = kernel._replace(ceiling_flop_per_clock_per_sm=rate)
            tile_constants = replace(tile_constants, prologue_bytes=0.0)
    plan = schedule(product, gpu, tile_constants, kernel, traffic=op)
    floor = floor_s(op, gpu) / limit
    factor = 1 / speedup
    if op.direction == BACKWARD_DATA and any(stride > 1 for stride in op.stride):
        factor *= _STRIDED_GRADIENT_FACTOR
    math_s, memory_s = plan.math_s * factor, plan.memory_s * factor + conversion_s
    time_s = max(plan.time_s * factor + conversion_s + constants.kernel_s(gpu), floor)
    busy = max(math_s, memory_s)
    return from_datasheet(
        time_s,
        floor,
        _SPREAD,
        busy_s=busy,
        math_s=math_s,
        memory_s=memory_s,
        kernel_family=kernel.family,
        tile=(plan.tile.rows, plan.tile.columns),
        waves=plan.blocks / gpu.sms,
        reason=reason,
    )


def _runs_winograd(op: Conv) -> bool:
    return (
        op.groups == 1
        and op.dtype == "fp32"
        and all(size in _WINOGRAD_KERNELS for size in op.kernel_size)
        and all(step == 1 for step in (*op.stride, *op.dilation))
    )


def _depthwise(op: Conv, gpu: Gpu, constants: Constants) -> Estimate:
    """A convolution with too few channels per group for Tensor Cores: it streams memory, badly."""
    share = _DEPTHWISE_BANDWIDTH_SHARE[op.channels_last]
    if op.direction == BACKWARD_WEIGHT:
        share /= _DEPTHWISE_WEIGHT_GRADIENT_FACTOR
    memory_s = op.moved_bytes / (rate_bytes_per_s(op.moved_bytes, gpu, constants) * share)
    math_s = op.flop / (gpu.peak_flop_per_s("fp32") * _DEPTHWISE_MATH_SHARE)
    floor = floor_s(op, gpu)
    busy = max(memory_s, math_s)
    time_s = max(busy + constants.kernel_s(gpu), floor)
    return from_datasheet(
        time_s,
        floor,
        _DEPTHWISE_SPREAD,
        busy_s=busy,
        math_s=math_s,
        memory_s=memory_s,
        kernel_family=SIMT,
        reason=f"{op.in_channels // op.groups} channels per group: CUDA cores, not Tensor Cores",
    )
