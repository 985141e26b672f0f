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
from tilefit.cost.tables import facts
from tilefit.cost.tiles import TILES, ceil_div, round_up
from tilefit.gpus import Gpu
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Conv, Conv2d, Gemm, Op, StepOp
from tilefit.ops.dtypes import HALVES, LINE_BYTES, elements_per_access, size_bytes

#: What was measured of them, with the sources.
_KNOWN = facts("conv")
#: Depthwise and narrow grouped kernels on CUDA cores, by pass, channels-last, strided: share of bandwidth,
#: multiply-adds per clock and SM, fixed time over that of a product's kernel.
_NARROW = {(way, last, strided): rest for way, last, strided, *rest in _KNOWN.narrow}
#: Before Ampere (cuDNN 7.6; DeepBench's layers on V100 and T4) a contraction is split for weight gradients
#: alone; data gradients have the large tiles alone, so that 8 images of 7 x 7 pixels take as long as 16; a
#: weight gradient is a product for each tap, whose channels fill whole tiles of so many. Forward kernels of
#: few channels fill 128 columns.
_TAP_TILE = {(7, 0): 64, (7, 5): 128}
_LARGE_TILES = tuple(tile for tile in TILES if tile.rows * tile.columns >= 128 * 128)
_WIDE_TILES = tuple(tile for tile in TILES if tile.columns >= 128)

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
    misaligned = any(channels % elements_per_access(op.dtype) for channels in op.group_channels)
    lacks = misaligned and "misaligned convolutions" in gpu.lacks
    tensor_cores = uses_tensor_cores(op.dtype, gpu) and not lacks
    path = (_on_tensor_cores if tensor_cores else _on_cuda_cores)(op, gpu, constants)
    plan = schedule(path.product, gpu, path.constants, path.kernel, traffic=op)
    added_s = path.conversion_s + _added_s(op, path.product, plan.split, gpu, constants) * tensor_cores
    factor = _over_product(op, gpu) / (_KNOWN.winograd_speedup if path.winograd else 1.0)
    plan = plan._replace(math_s=plan.math_s * factor, memory_s=plan.memory_s * factor + added_s)
    time_s = plan.time_s * factor + added_s + constants.kernel_s(gpu)
    least_s = floor_s(op, gpu) / (_KNOWN.winograd_limit if path.winograd else 1.0)
    return from_datasheet(op, gpu, time_s, _KNOWN.spread, floor=least_s, **plan.facts(path.kernel, gpu))


def _over_product(op: Conv, gpu: Gpu) -> float:
    """How many times as long a pass takes as the product that it is."""
    factor: float = _KNOWN.strided_gradient if op.direction == BACKWARD_DATA and max(op.stride) > 1 else 1.0
    if op.groups == 1 or not uses_tensor_cores(op.dtype, gpu):
        return factor
    widths = op.group_channels
    few_wide = op.channels_last and op.groups < _KNOWN.many_groups and min(widths) >= _KNOWN.wide_group
    older = _KNOWN.wide_groups[op.direction] if few_wide and "grouped convolutions" in gpu.lacks else 1.0
    over = 1.0
    if op.groups > _KNOWN.few_groups and _grouping(op) == "packed":
        over = _KNOWN.packed * older
    elif op.channels_last:
        together = widths[0] == widths[1] and widths[0] in _KNOWN.together_widths and older == 1.0
        over = _KNOWN.together if together else _KNOWN.group_by_group * older
    return factor * over


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
    plain, rate = op.groups == max(*op.stride, *op.dilation) == 1, inf
    if not plain or min(op.group_channels) < _KNOWN.measured_channels:
        return rate
    if op.direction == BACKWARD_DATA:
        whole = prod(op.output_size) == 1 < prod(op.kernel_size) and not op.channels_last
        rate = _KNOWN.from_a_pixel if whole and op.dtype == "tf32" else inf
    elif op.dtype in HALVES and prod(op.kernel_size) > _KNOWN.most_taps:
        gradient = _KNOWN.large_gradient if op.direction == BACKWARD_WEIGHT else inf
        rate = _KNOWN.fallen if op.weight_elements > _KNOWN.most_elements else gradient
    return rate


def falls(op: Op, gpu: Gpu) -> bool:
    """Whether a convolution pass falls to kernels without Tensor Cores although its sizes are aligned."""
    fallen: float = _KNOWN.fallen
    return _large_filter_rate(op, gpu) == fallen


def with_large_filter(op: Op, estimate: Estimate, gpu: Gpu) -> Estimate:
    """The estimate of an operation, or of the slower kernels that its large filter leaves."""
    time_s = clocks_s(op.flop / _large_filter_rate(op, gpu), gpu)
    if time_s <= estimate.time_s:
        return estimate
    what, family = "fast weight gradient", estimate.kernel_family
    if falls(op, gpu):
        what, family = "Tensor Core kernel", SIMT
    facts = {"bound": MATH, "kernel_family": family, "reason": f"no {what} for so large a filter"}
    return estimate.within(time_s, _KNOWN.fallen_spread, 0.0, math_s=time_s, **facts)


def with_bias(op: Op, estimate: Estimate, gpu: Gpu) -> Estimate:
    """The estimate of an operation and of the kernel that adds a bias to a convolution's result."""
    if not isinstance(op, Conv) or not op.bias:
        return estimate
    found = constants_of(gpu)
    written = op.write_bytes
    math_s = clocks_s(_KNOWN.bias_clocks * written / size_bytes(op.dtype), gpu)
    added_s = max(_KNOWN.bias_s + max(math_s, moved_s(2 * written, gpu, found)), found.kernel_s(gpu))
    return estimate.each(lambda time_s: time_s + added_s)


@launches(Conv)
def launch_conv(op: Conv, phase: str, gpu: Gpu, compiled: bool) -> tuple[int, float | None]:
    """Compiled, one call makes both gradients of a convolution."""
    return 1, KERNEL_S * kernels(op, gpu) if compiled and op.direction == BACKWARD_WEIGHT else None


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
    winograd = once and all(size in _KNOWN.winograd_sizes for size in op.kernel_size)
    reason = kernel.reason + ", by Winograd's algorithm" * winograd
    return _Path(op.implicit_gemm, kernel._replace(reason=reason), constants, winograd=winograd)


def _on_tensor_cores(op: Conv, gpu: Gpu, constants: Constants) -> _Path:
    access = elements_per_access(op.dtype)
    channels = op.group_channels
    weight_gradient = op.direction == BACKWARD_WEIGHT
    older = gpu.compute_capability < (8, 0)
    few = channels[0] <= access and op.groups == 1
    if older and few and weight_gradient and prod(op.kernel_size) > _KNOWN.most_tap_products:
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
        rate = _KNOWN.converted_misaligned_nchw if misaligned else _KNOWN.converted_nchw
        reason = "NCHW in memory: cuDNN converts to NHWC and back around the Tensor Core kernel"
    elif misaligned and channels[0] >= access:
        rate = _KNOWN.converted_misaligned_nhwc
        reason = f"channels {channels[0]} -> {channels[1]} are not multiples of {access}: padded copies"
    else:
        reason = "implicit matrix product in NHWC"
    activations = (op.input_elements + op.output_elements) * size_bytes(op.dtype)
    reached = gpu.memory_bandwidth_bytes_per_s * constants.memory_efficiency
    conversion_s = 2 * activations / min(rate * gpu.sms * gpu.boost_clock_hz, reached) if rate else 0.0
    # The padded product is aligned; what misalignment costs is the copies around it.
    family = select(replace(product, m=round_up(product.m, 64), k=round_up(product.k, 64)), gpu).family
    in_pieces = plain and not is_plain_product(op)
    ceiling = CEILINGS[size_bytes(op.dtype), PLAIN_ACCESS_BYTES][1] if in_pieces else 0.0
    constants = replace(constants, small_tile_exponent=0.0)
    if few and whole == access:
        ceiling = _KNOWN.few_channels_weight_gradient if weight_gradient else _KNOWN.few_channels
        if older and op.direction == FORWARD:  # at the clock that is sustained
            ceiling *= constants.math_efficiency / GENERAL.math_efficiency
        constants = replace(constants, prologue_bytes=0.0)
    kernel = Kernel(family, reason, ceiling, feed_bytes_per_clock_per_sm=feed(gpu))
    if older and not weight_gradient:
        tiles = _LARGE_TILES if op.direction == BACKWARD_DATA else _WIDE_TILES if few else TILES
        kernel = kernel._replace(splits=(1,), tiles=tiles)
    return _Path(product, kernel, constants, conversion_s)


def _depthwise(op: Conv, gpu: Gpu, constants: Constants) -> Estimate:
    """A convolution with too few channels per group for Tensor Cores: it streams memory, badly."""
    share, per_clock, kernels = _NARROW[op.direction, op.channels_last, max(op.stride) > 1]
    memory_s = op.moved_bytes / (rate_bytes_per_s(op.moved_bytes, gpu, constants) * share)
    pixels = op.input_elements if op.direction == BACKWARD_DATA else 0
    tried = max(op.output_elements, pixels) * prod(op.kernel_size) * min(op.group_channels)
    math_s = clocks_s(tried / per_clock, gpu)
    time_s = max(memory_s, math_s) + kernels * constants.kernel_s(gpu)
    reason = f"{op.in_channels // op.groups} channels per group: CUDA cores, not Tensor Cores"
    return from_datasheet(
        op, gpu, time_s, _KNOWN.spread, math_s=math_s, memory_s=memory_s, kernel_family=SIMT, reason=reason
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
