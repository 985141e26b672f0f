"""Time of a convolution as an implicit matrix product."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as every
from math import gcd, inf, log2, prod
from typing import NamedTuple

from tilefit.cost.analytic import estimates, from_datasheet
from tilefit.cost.constants import GENERAL, Constants
from tilefit.cost.constants import constants as constants_of
from tilefit.cost.conv_kernels import PLAIN_ACCESS_BYTES, is_plain_product, kernels
from tilefit.cost.estimate import MATH, Estimate
from tilefit.cost.features import (
    ALIGNMENTS,
    FIXED_S,
    MEMORY_SHARE,
    Row,
    best_split,
    describes,
    one_hot,
    tiling,
)
from tilefit.cost.gemm import schedule
from tilefit.cost.kernels import CEILINGS, SIMT, Kernel, feed, on_cuda_cores, select, uses_tensor_cores
from tilefit.cost.launch import KERNEL_S, counts, launches
from tilefit.cost.memory import clocks_s, floor_s, moved_s, rate_bytes_per_s
from tilefit.cost.tables import toml
from tilefit.cost.tiles import TILES, ceil_div, round_up
from tilefit.gpus import Gpu
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Conv, Conv2d, Gemm, Op, Settings, StepOp
from tilefit.ops.dtypes import HALVES, LINE_BYTES, elements_per_access, size_bytes

#: fp32 convolutions of 3 x 3 and 5 x 5 at stride 1 run by Winograd's algorithm: how much faster than the
#: implicit product (DeepBench's V100 and T4, median of 29 layers), and the most it can save (F(2x2, 3x3)).
_WINOGRAD_KERNELS = (3, 5)
_WINOGRAD_SPEEDUP = 1.7
_WINOGRAD_LIMIT = 2.25
#: A strided data gradient does not skip all the taps that meet no pixel (between the medians of
#: DeepBench's fp16 and fp32 layers on V100 and T4).
_STRIDED_GRADIENT_FACTOR = 1.25
#: Bytes per clock and SM at which cuDNN converts between layouts, NCHW to NHWC and back, where the memory is
#: not slower: each activation is read and written once. Aligned channels in NCHW; misaligned in NCHW;
#: misaligned in NHWC (padded copies). From the extra time of six 3 x 3 layers on an H200 (PyTorch 2.11, cuDNN
#: 9.19).
_CONVERTED_PER_CLOCK_PER_SM = 8.9
_MISALIGNED_NCHW_PER_CLOCK_PER_SM = 6.4
_MISALIGNED_NHWC_PER_CLOCK_PER_SM = 5.4
#: The first layers' kernels gather channels one by one: FLOP per clock and SM that remain, counted on the
#: channels padded to a full access, forward and for the weight gradient; the gathers hide the prologue.
#: From 3, 4 and 8 channels at the input of ResNet, VGG, MobileNet and ViT on an H200, which all take nearly
#: the same time (``benchmarks/first_convolution.py``).
_FEW_CHANNELS_FLOP_PER_CLOCK_PER_SM = 420.0
_FEW_CHANNELS_WEIGHT_GRADIENT = 670.0
#: Depthwise and narrow grouped kernels on CUDA cores, by pass, channels-last, strided: share of bandwidth,
#: multiply-adds per clock and SM, fixed time over that of a product's kernel.
_NARROW = {(way, last, strided): rest for way, last, strided, *rest in toml("constants")["narrow"]}
_SPREAD = 0.4
#: Before Ampere (cuDNN 7.6; DeepBench's layers on V100 and T4) a contraction is split for weight gradients
#: alone; data gradients have the large tiles alone, so that 8 images of 7 x 7 pixels take as long as 16; a
#: weight gradient is a product for each tap, whose channels fill whole tiles of so many.
_TAP_TILE = {(7, 0): 64, (7, 5): 128}
_LARGE_TILES = tuple(tile for tile in TILES if tile.rows * tile.columns >= 128 * 128)
#: There too, forward kernels of few channels fill 128 columns. Gradients have further kernels: zeros before,
#: and of weights a sum behind, of what lies in memory in fp32, on Turing also where nothing is split. Filters
#: of more taps than this (known of 5 x 20 on one channel) get no product for each of them, but CUDA cores.
_WIDE_TILES = tuple(tile for tile in TILES if tile.columns >= 128)
_MOST_TAP_PRODUCTS = 64
#: Grouped convolutions, over the product of all groups: packed ones share a tile (the profile of an H200,
#: median of the layers of 50 models: 0.5). Of others in NHWC those of 64 to 512 channels, by powers of two,
#: have kernels for all groups (the same profile, medians by channels: 1.0 to 1.2, of data gradients 1.5 to
#: 2.5: ``benchmarks/grouped_convolutions.py``); the rest run group by group (2 to 5 there; of RegNet and
#: ResNeSt 1.5 to 1.8 on an RTX 3090, 2.7 to 2.9 on a 4090, as their steps leave it).
_PACKED, _TOGETHER, _GROUP_BY_GROUP = 0.55, 1.2, 2.0
_FEW_GROUPS, _TOGETHER_WIDTHS = 4, (64, 128, 256, 512)
#: The same in NHWC before cuDNN 8.5, of fewer groups of so many channels, over that: forward of timm's models
#: on an RTX 3090 under PyTorch 1.12 over 2.4; backward what is left of training steps there, of the four
#: models of ``timm_tables.py --seed 0`` that have such (8.0 to 9.4; of three others 8.3 to 9.1).
_WIDE_GROUP, _MANY_GROUPS = 32, 32
_WIDE_GROUPS = {FORWARD: 2.9, BACKWARD_DATA: 8.8, BACKWARD_WEIGHT: 8.8}
#: Dense filters of more than 32 taps on Hopper in 16 bits (``benchmarks/results/large_filters_h100.jsonl``):
#: forward passes and weight gradients of more than 2^20 elements fall to kernels without Tensor Cores,
#: whatever the layout and the autotuner (1.2 million do, 0.99 million do not; between is a guess), and weight
#: gradients of fewer have slow ones. FLOP per clock and SM: geometric means of 6 and of 4 passes, which took
#: 0.7 to 1.4 times as long. Fewer channels were not measured.
_MOST_TAPS, _MOST_ELEMENTS = 32, 2**20
_FALLEN_FLOP_PER_CLOCK_PER_SM = 102.0
_LARGE_GRADIENT_FLOP_PER_CLOCK_PER_SM = 484.0
_FALLEN_SPREAD = 0.45
#: From one pixel to an image, as the first layer of a GAN's generator does, TF32 in NCHW has no Tensor Core
#: kernel there either: FLOP per clock and SM; of 11 sizes on an H100 1.1 to 4.2
#: (``benchmarks/function_times.py``).
_FROM_A_PIXEL_FLOP_PER_CLOCK_PER_SM = 3.0
_MEASURED_CHANNELS = 24
#: The kernel that adds a bias to what cuDNN left, in any layout: clocks of a multiprocessor for an element,
#: and what is before them, all at least as long as any kernel. Set to 2,210 sizes on an H100; of 1,996 drawn
#: anew the median is 1.05 times as long, and 9 % off (``benchmarks/conv_bias.py``).
_BIAS_CLOCKS, _BIAS_S = 0.75, 1.2e-6

#: What tells passes apart for the networks.
_DTYPES = ("bf16", "fp16", "tf32", "fp32")
_DIRECTIONS = (FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT)
_TAPS, _STEPS = (1, 2, 3, 4, 5, 7, 11), (1, 2, 4, 16)
_CASES = tuple(every(_DIRECTIONS, (False, True), (False, True), (False, True)))
#: Channels per group, as wide in as out, for which the library has Tensor Core kernels that take all groups
#: at once: on an H200 one such pass in seven ran group by group, of the others between three and six in ten
#: (more than four groups, more than one channel each; the kernels that ran in ``collect_h200.py``).
_PACKED_WIDTHS = (4, 8, 16, 32)
_GROUPINGS = ("one", "packed", "depthwise", "other")
_CHANNELS = (1, 2, 3, 4, 8, 16, 32, 64)
#: What the groups and the pass, and what the layout and a 1 x 1 kernel decide together.
_GROUPED = tuple(every(_DIRECTIONS, _GROUPINGS))
_POINTWISE = tuple(every((False, True), (False, True), _GROUPINGS))


@estimates(Conv)
def estimate_conv(op: Conv, gpu: Gpu, constants: Constants) -> Estimate:
    """Predicted time of a convolution pass."""
    if op.is_narrow:
        return _depthwise(op, gpu, constants)
    tensor_cores = uses_tensor_cores(op.dtype, gpu)
    if tensor_cores and "misaligned convolutions" in gpu.lacks:
        tensor_cores = not any(channels % elements_per_access(op.dtype) for channels in op.group_channels)
    path = (_on_tensor_cores if tensor_cores else _on_cuda_cores)(op, gpu, constants)
    plan = schedule(path.product, gpu, path.constants, path.kernel, traffic=op)
    added_s = path.conversion_s + _added_s(op, path.product, plan.split, gpu, constants) * tensor_cores
    factor = _over_product(op, gpu) / (_WINOGRAD_SPEEDUP if path.winograd else 1.0)
    plan = plan._replace(math_s=plan.math_s * factor, memory_s=plan.memory_s * factor + added_s)
    time_s = plan.time_s * factor + added_s + constants.kernel_s(gpu)
    least_s = floor_s(op, gpu) / (_WINOGRAD_LIMIT if path.winograd else 1.0)
    return from_datasheet(op, gpu, time_s, _SPREAD, floor=least_s, **plan.facts(path.kernel, gpu))


def _over_product(op: Conv, gpu: Gpu) -> float:
    """How many times as long a pass takes as the product that it is."""
    factor = 1.0
    if op.direction == BACKWARD_DATA and any(stride > 1 for stride in op.stride):
        factor *= _STRIDED_GRADIENT_FACTOR
    if op.groups > 1 and uses_tensor_cores(op.dtype, gpu):
        factor *= _over_all_groups(op, gpu)
    return factor


def _over_all_groups(op: Conv, gpu: Gpu) -> float:
    """How many times as long a grouped pass takes as the product of all groups."""
    few_wide = op.channels_last and op.groups < _MANY_GROUPS and min(op.group_channels) >= _WIDE_GROUP
    older = _WIDE_GROUPS[op.direction] if few_wide and "grouped convolutions" in gpu.lacks else 1.0
    if op.groups > _FEW_GROUPS and _grouping(op) == "packed":
        return _PACKED * older
    if not op.channels_last:
        return 1.0
    channels_in, channels_out = op.group_channels
    together = channels_in == channels_out and channels_in in _TOGETHER_WIDTHS and older == 1.0
    return _TOGETHER if together else _GROUP_BY_GROUP * older


def _added_s(op: Conv, product: Gemm, split: int, gpu: Gpu, constants: Constants) -> float:
    """What gradients take before Ampere beside the product: kernels, and sums in memory that are read."""
    if gpu.compute_capability >= (8, 0) or op.direction == FORWARD:
        return 0.0
    if op.direction == BACKWARD_DATA:
        return constants.kernel_s(gpu)
    copies = split if split > 1 else 2 * (gpu.compute_capability >= (7, 5))
    return 2 * constants.kernel_s(gpu) + moved_s(4 * copies * product.m * product.n, gpu, constants)


def _large_filter_rate(op: Op, gpu: Gpu) -> float:
    """FLOP per clock and SM that a large filter leaves; infinite where the library has its usual kernels."""
    if not isinstance(op, Conv) or gpu.compute_capability != (9, 0) or len(op.kernel_size) != 2:
        return inf
    if op.groups != 1 or max(*op.stride, *op.dilation) > 1 or min(op.group_channels) < _MEASURED_CHANNELS:
        return inf
    if op.direction == BACKWARD_DATA:
        whole = prod(op.output_size) == 1 < prod(op.kernel_size) and not op.channels_last
        return _FROM_A_PIXEL_FLOP_PER_CLOCK_PER_SM if whole and op.dtype == "tf32" else inf
    if op.dtype not in HALVES or prod(op.kernel_size) <= _MOST_TAPS:
        return inf
    if op.weight_elements > _MOST_ELEMENTS:
        return _FALLEN_FLOP_PER_CLOCK_PER_SM
    return _LARGE_GRADIENT_FLOP_PER_CLOCK_PER_SM if op.direction == BACKWARD_WEIGHT else inf


def falls(op: Op, gpu: Gpu) -> bool:
    """Whether a convolution pass falls to kernels without Tensor Cores although its sizes are aligned."""
    return _large_filter_rate(op, gpu) == _FALLEN_FLOP_PER_CLOCK_PER_SM


def with_large_filter(op: Op, estimate: Estimate, gpu: Gpu) -> Estimate:
    """The estimate of an operation, or of the slower kernels that its large filter leaves."""
    time_s = clocks_s(op.flop / _large_filter_rate(op, gpu), gpu)
    if time_s <= estimate.time_s:
        return estimate
    fallen = falls(op, gpu)
    return estimate.within(
        time_s,
        _FALLEN_SPREAD,
        math_s=time_s,
        bound=MATH,
        kernel_family=SIMT if fallen else estimate.kernel_family,
        reason=f"no {'Tensor Core kernel' if fallen else 'fast weight gradient'} for so large a filter",
    )


def with_bias(op: Op, estimate: Estimate, gpu: Gpu) -> Estimate:
    """The estimate of an operation and of the kernel that adds a bias to a convolution's result."""
    if not isinstance(op, Conv) or not op.bias:
        return estimate
    found = constants_of(gpu)
    written = op.write_bytes
    math_s = clocks_s(_BIAS_CLOCKS * written / size_bytes(op.dtype), gpu)
    added_s = max(_BIAS_S + max(math_s, moved_s(2 * written, gpu, found)), found.kernel_s(gpu))
    return estimate.each(lambda time_s: time_s + added_s)


@launches(Conv)
def launch_conv(op: Conv, phase: str, gpu: Gpu, settings: Settings) -> tuple[int, float | None]:
    """Compiled, one call makes both gradients of a convolution."""
    return 1, KERNEL_S * kernels(op, gpu) if settings.compiled and op.direction == BACKWARD_WEIGHT else None


@counts(Conv)
def count_conv(op: Conv, gpu: Gpu, entry: StepOp) -> int:
    """Those of the pass, and of a bias."""
    return kernels(op, gpu) + (entry.phase == FORWARD and len(entry.inputs) > 2)


class _Path(NamedTuple):
    """How a library runs a convolution as a product.

    Attributes:
        product, kernel, constants: As :func:`~tilefit.cost.gemm.schedule` takes them.
        conversion_s: Time of the copies around it.
        winograd: It runs by Winograd's algorithm.
    """

    product: Gemm
    kernel: Kernel
    constants: Constants
    conversion_s: float = 0.0
    winograd: bool = False


def _on_cuda_cores(op: Conv, gpu: Gpu, constants: Constants) -> _Path:
    kernel = select(op.implicit_gemm, gpu)
    if kernel.family != SIMT:
        kernel = on_cuda_cores(gpu, f"channels {op.group_channels} are not multiples of 16 bytes: CUDA cores")
    once = op.groups == max(*op.stride, *op.dilation) == 1 and op.dtype == "fp32"
    winograd = once and all(size in _WINOGRAD_KERNELS for size in op.kernel_size)
    reason = kernel.reason + ", by Winograd's algorithm" * winograd
    return _Path(op.implicit_gemm, kernel._replace(reason=reason), constants, winograd=winograd)


def _on_tensor_cores(op: Conv, gpu: Gpu, constants: Constants) -> _Path:
    access = elements_per_access(op.dtype)
    channels = op.group_channels
    weight_gradient = op.direction == BACKWARD_WEIGHT
    older = gpu.compute_capability < (8, 0)
    few = channels[0] <= access and op.groups == 1
    if older and few and weight_gradient and prod(op.kernel_size) > _MOST_TAP_PRODUCTS:
        kernel = on_cuda_cores(gpu, f"{prod(op.kernel_size)} taps: CUDA cores")
        return _Path(replace(op, in_channels=access).implicit_gemm, kernel, constants)
    whole = _TAP_TILE.get(gpu.compute_capability, access) if weight_gradient and op.groups == 1 else access
    product = replace(
        op,
        in_channels=round_up(channels[0], whole) * op.groups,
        out_channels=round_up(channels[1], whole) * op.groups,
    ).implicit_gemm
    misaligned = any(c % access for c in channels)
    rate = 0.0
    # ResNet-50's training on Lambda's GPUs takes as long as with gradients that are converted.
    plain = is_plain_product(op) or (op.direction == FORWARD and is_plain_product(op, PLAIN_ACCESS_BYTES))
    if plain:
        reason = "1 x 1 in NCHW: a plain product for each image"
    elif not op.channels_last:
        rate = _MISALIGNED_NCHW_PER_CLOCK_PER_SM if misaligned else _CONVERTED_PER_CLOCK_PER_SM
        reason = "NCHW in memory: cuDNN converts to NHWC and back around the Tensor Core kernel"
    elif misaligned and channels[0] >= access:
        rate = _MISALIGNED_NHWC_PER_CLOCK_PER_SM
        reason = f"channels {channels[0]} -> {channels[1]} are not multiples of {access}: padded copies"
    else:
        reason = "implicit matrix product in NHWC"
    conversion_s = 0.0
    if rate:
        activations = (op.input_elements + op.output_elements) * size_bytes(op.dtype)
        reached = gpu.memory_bandwidth_bytes_per_s * constants.memory_efficiency
        conversion_s = 2 * activations / min(rate * gpu.sms * gpu.boost_clock_hz, reached)
    # The padded product is aligned; what misalignment costs is the copies around it.
    family = select(replace(product, m=round_up(product.m, 64), k=round_up(product.k, 64)), gpu).family
    ceiling = (
        0.0 if not plain or is_plain_product(op) else CEILINGS[size_bytes(op.dtype), PLAIN_ACCESS_BYTES][1]
    )
    kernel = Kernel(family, reason, ceiling, feed_bytes_per_clock_per_sm=feed(gpu))
    constants = replace(constants, small_tile_exponent=0.0)
    if older and not weight_gradient:
        kernel = kernel._replace(splits=(1,), tiles=_LARGE_TILES if op.direction == BACKWARD_DATA else TILES)
    if few and whole == access:
        rate = _FEW_CHANNELS_WEIGHT_GRADIENT if weight_gradient else _FEW_CHANNELS_FLOP_PER_CLOCK_PER_SM
        kernel = kernel._replace(ceiling_flop_per_clock_per_sm=rate)
        if older and op.direction == FORWARD:
            rate *= constants.math_efficiency / GENERAL.math_efficiency  # at the clock that is sustained
            kernel = kernel._replace(ceiling_flop_per_clock_per_sm=rate, tiles=_WIDE_TILES)
        constants = replace(constants, prologue_bytes=0.0)
    return _Path(product, kernel, constants, conversion_s)


def _depthwise(op: Conv, gpu: Gpu, constants: Constants) -> Estimate:
    """A convolution with too few channels per group for Tensor Cores: it streams memory, badly."""
    share, per_clock, kernels = _NARROW[op.direction, op.channels_last, max(op.stride) > 1]
    memory_s = op.moved_bytes / (rate_bytes_per_s(op.moved_bytes, gpu, constants) * share)
    pixels = op.input_elements if op.direction == BACKWARD_DATA else 0
    tried = max(op.output_elements, pixels) * prod(op.kernel_size) * min(op.group_channels)
    math_s = clocks_s(tried / per_clock, gpu)
    return from_datasheet(
        op,
        gpu,
        max(memory_s, math_s) + kernels * constants.kernel_s(gpu),
        _SPREAD,
        math_s=math_s,
        memory_s=memory_s,
        kernel_family=SIMT,
        reason=f"{op.in_channels // op.groups} channels per group: CUDA cores, not Tensor Cores",
    )


# --- what the networks see -------------------------------------------------------------------------


def _grouping(op: Conv) -> str:
    channels_in, channels_out = op.group_channels
    if op.groups == 1:
        return "one"
    if channels_in == channels_out and channels_in in _PACKED_WIDTHS:
        return "packed"
    return "depthwise" if channels_in == 1 else "other"


def _paths(op: Conv, gpu: Gpu) -> list[float]:
    """What decides between the library's paths: groups, padded channels, split contractions, the image."""
    size, access = size_bytes(op.dtype), elements_per_access(op.dtype)
    channels_in, channels_out = op.group_channels
    padded_in, padded_out = round_up(channels_in, access), round_up(channels_out, access)
    grouping = _grouping(op)
    equal = op.groups > 1 and channels_in == channels_out
    power_in, power_out = (channels & (channels - 1) == 0 for channels in (channels_in, channels_out))
    plain = prod(op.kernel_size) == prod(op.stride) == 1 and max(op.padding) == 0
    height, width = (op.input_size[-2] if len(op.input_size) > 1 else 1), op.input_size[-1]
    rows, columns = (op.output_size[-2] if len(op.input_size) > 1 else 1), op.output_size[-1]
    pixels_in, pixels_out = prod(op.input_size), prod(op.output_size)
    row = [
        float(channels_in == channels_out), float(power_in), float(power_out), float(equal),
        float(equal and power_in), float(channels_in == channels_out == 1),
        log2(gcd(op.in_channels, 16)), log2(gcd(op.out_channels, 16)), log2(gcd(op.groups, 64)),
        log2(op.in_channels), log2(op.out_channels), log2(padded_in / channels_in),
        log2(padded_out / channels_out),
        log2(height), log2(width), log2(rows), log2(columns), float(op.stride[-1]), float(op.padding[-1]),
        float(op.padding[-1] == 0), float(pixels_out == 1), float(op.batch == 1),
        float(max(op.dilation) > 1 and max(op.stride) > 1),
        log2(gcd(pixels_out * size, LINE_BYTES)), log2(gcd(pixels_in * size, LINE_BYTES)),
        log2(ceil_div(rows, 2) * ceil_div(columns, 2) * 4 / (rows * columns)),
    ]  # fmt: skip
    for elements in (op.input_elements, op.output_elements, op.weight_elements):
        row.append(max(0.0, log2(elements * size / gpu.l2_bytes)))
    # The product with its channels padded to whole accesses, group by group where it runs so.
    matrix = op.implicit_gemm
    if op.direction == BACKWARD_WEIGHT:
        m, n, k = matrix.m // channels_in * padded_in, padded_out, matrix.k
    elif op.direction == FORWARD:
        m, n, k = matrix.m, padded_out, matrix.k // channels_in * padded_in
    else:
        m, n, k = matrix.m, padded_in, round_up(matrix.k, access)
    calls = op.groups if grouping == "other" else 1
    padded = Gemm(m, n, k, op.dtype, batch=matrix.batch // calls)
    large_s, large_split = best_split(padded, gpu, 128)
    small_s, small_split = best_split(padded, gpu, 64)
    memory_s = op.moved_bytes / calls / gpu.memory_bandwidth_bytes_per_s / MEMORY_SHARE
    call_s = max(min(large_s, small_s), memory_s) + FIXED_S
    row += [
        log2(calls * large_s), log2(calls * small_s), log2(large_split), log2(small_split),
        log2(calls * call_s),
    ]  # fmt: skip
    # The product of one image, as NCHW has it in memory.
    image = replace(replace(op, batch=1).implicit_gemm, batch=op.batch * op.groups)
    if op.direction == BACKWARD_DATA:  # all taps, those that a stride skips too: so the networks were fitted
        image = replace(image, k=channels_out * prod(op.kernel_size))
    row.append(log2(best_split(image, gpu, 128)[0]))
    row += one_hot(channels_in, _CHANNELS) + one_hot(channels_out, _CHANNELS)
    row += one_hot((op.direction, grouping), _GROUPED)
    row += one_hot((op.channels_last, plain, grouping), _POINTWISE)
    return row


@describes(Conv2d(8, 24, 72, 30, 3, 2, dtype="fp16"))
def conv_features(op: Conv, gpu: Gpu) -> Row:
    """What the networks see: the equivalent product, and what gathering its operands costs."""
    size = size_bytes(op.dtype)
    access = elements_per_access(op.dtype)
    matrix = op.implicit_gemm
    peak = gpu.peak_flop_per_s(op.dtype)
    moved = op.moved_bytes
    channels_in, channels_out = op.group_channels
    math_s = op.flop / peak
    memory_s = moved / gpu.memory_bandwidth_bytes_per_s
    tiled_s, tiles = tiling(matrix, peak, gpu)
    activations_s = size * (op.input_elements + op.output_elements) / gpu.memory_bandwidth_bytes_per_s
    narrow = op.groups > 1 and min(channels_in, channels_out) < access
    cuda_cores_s = op.flop / gpu.peak_flop_per_s("fp32")
    # A narrow group runs on CUDA cores; NCHW is converted to NHWC and back around a Tensor Core kernel.
    busy_s = 4 * cuda_cores_s if narrow else tiled_s
    converted_s = 0.0 if op.channels_last or narrow or op.dtype == "fp32" else 4 * activations_s
    baseline_s = max(busy_s, memory_s / MEMORY_SHARE) + converted_s + FIXED_S
    taps = prod(op.kernel_size)
    step = prod(op.stride)
    aligned = [gcd(channels, 2 * access) for channels in (channels_in, channels_out)]
    row = [
        log2(op.batch), log2(channels_in), log2(channels_out), log2(op.groups), log2(taps), log2(step),
        float(max(op.dilation) > 1), float(op.channels_last), float(len(op.input_size)),
        float(max(op.kernel_size)), float(min(op.kernel_size)), float(max(op.padding)),
        log2(prod(op.input_size)), log2(prod(op.output_size)),
        log2(op.input_elements * size), log2(op.output_elements * size), log2(op.weight_elements * size),
        log2(matrix.m), log2(matrix.n), log2(matrix.k),
        log2(math_s), log2(memory_s), log2(math_s / memory_s), log2(tiled_s), log2(baseline_s),
        float(op.groups == 1), float(op.is_depthwise), float(taps == 1), float(taps == 1 and step == 1),
        float(taps == 9 and step == 1), float(channels_in < access), float(channels_out < access),
        *(log2(each) for each in aligned), float(min(aligned) >= access),
        float(op.channels_last and min(aligned) >= access), log2(gcd(op.output_size[-1], 64)),
        float(narrow), log2(cuda_cores_s), log2(activations_s), log2(busy_s / memory_s),
        log2(gcd(op.batch, 64)), log2(gcd(op.input_size[-1], 64)), log2(gcd(prod(op.output_size), 256)),
        log2(gcd(channels_in, 256)), log2(gcd(channels_out, 256)),
        float(op.padding[-1] * 2 == op.kernel_size[-1] - 1),
        log2(channels_in * taps), log2(prod(op.input_size) / prod(op.output_size)),
        log2(ceil_div(channels_in, 64) * 64 / channels_in),
        log2(ceil_div(channels_out, 64) * 64 / channels_out),
    ]  # fmt: skip
    row += tiles
    row += one_hot(op.dtype, _DTYPES) + one_hot(op.direction, _DIRECTIONS)
    row += one_hot(max(op.kernel_size), _TAPS) + one_hot(step, _STEPS)
    for each in aligned:
        row += one_hot(each, ALIGNMENTS[:5])
    # What the library does depends on the pass, the layout and the alignment together.
    row += one_hot((op.direction, op.channels_last, min(aligned) >= access, op.groups == 1), _CASES)
    return baseline_s, row + _paths(op, gpu)
