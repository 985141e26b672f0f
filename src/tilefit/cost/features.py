"""What the fitted model sees of an operation: sizes, alignments, traffic, and how tiles divide it.

Each function returns a baseline in seconds, which the model corrects, and a row of numbers. The rows hold
analytic quantities (the roofline's two times, tiles, waves, quantization losses), so that a small network is
enough and that sizes it has never seen still look familiar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from math import ceil, gcd, log2, prod

from tilefit.cost.attention import CUDNN, EFFICIENT, FLASH, MATH_BACKEND, backend
from tilefit.cost.tiles import ceil_div, round_up
from tilefit.gpus import Gpu
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Attention, Conv, Gemm, Op, Streaming
from tilefit.ops.dtypes import LINE_BYTES, elements_per_access, size_bytes
from tilefit.ops.streaming import ROLES

#: Tiles whose quantization is described; a subset spans what the libraries use.
_TILES = (
    (32, 32), (64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128), (192, 192), (64, 256),
    (256, 64), (32, 128), (128, 32),
)  # fmt: skip
_GEMM_DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp8", "int8")
_LAYOUTS = ("TN", "NN", "NT", "TT")
_ALIGNMENTS = tuple(2**power for power in range(8))
#: Shares of the peak and of the bandwidth that large operations reach, and the time of the shortest kernel:
#: they only centre the baseline, the fit corrects it.
_MATH_SHARE = 0.84
_MEMORY_SHARE = 0.85
_FIXED_S = 2.2e-6
_PROLOGUE_BYTES = 256
_STAGE_BYTES = 128
#: A narrow product is described by fewer waves than this, without the loss of the last one.
_LEAST_WAVES = 0.2

Row = tuple[float, list[float]]


def _one_hot(value: object, values: Iterable[object]) -> list[float]:
    return [1.0 if value == each else 0.0 for each in values]


def _tiling(m: int, n: int, k: int, batch: int, size: int, peak: float, gpu: Gpu) -> Row:
    """The best time over the tiles, and how each divides the product over the SMs."""
    row: list[float] = []
    best = float("inf")
    wanted = m * n * batch
    depth = (ceil_div(k * size, _STAGE_BYTES) * _STAGE_BYTES + _PROLOGUE_BYTES) / size
    for a, b in _TILES:
        blocks = ceil_div(m, a) * ceil_div(n, b) * batch
        waves = blocks / gpu.sms
        whole = ceil(waves)
        row += (
            log2(waves),
            whole / waves if waves > _LEAST_WAVES else 0.0,
            log2(blocks * a * b / wanted),
        )
        best = min(best, whole * gpu.sms * 2 * a * b * depth / (peak * _MATH_SHARE))
    return best, row


def gemm(op: Gemm, gpu: Gpu) -> Row:
    """A matrix product."""
    m, n, k, batch, dtype = op.m, op.n, op.k, op.batch, op.dtype
    size = size_bytes(dtype)
    out_size = size_bytes(op.out_dtype or {"int8": "int32", "fp8": "bf16"}.get(dtype, dtype))
    peak = gpu.peak_flop_per_s(dtype)
    layout = op.layout
    ld_a = op.ld_a or (k if layout[1] == "N" else m)
    ld_b = op.ld_b or (n if layout[0] == "N" else k)
    aligned = (
        gcd(ld_a * size, LINE_BYTES), gcd(ld_b * size, LINE_BYTES), gcd(n * out_size, LINE_BYTES)
    )  # fmt: skip
    a_bytes, b_bytes, c_bytes = batch * m * k * size, batch * n * k * size, batch * m * n * out_size
    moved = a_bytes + b_bytes + c_bytes
    math_s = op.flop / peak
    memory_s = moved / gpu.memory_bandwidth_bytes_per_s
    tiled_s, tiling = _tiling(m, n, k, batch, size, peak, gpu)
    baseline_s = max(tiled_s, memory_s / _MEMORY_SHARE) + _FIXED_S
    worst = min(aligned)
    row = [
        log2(m), log2(n), log2(k), log2(batch), float(out_size), 1.0 if op.bias else 0.0,
        1.0 if op.ld_a or op.ld_b else 0.0,
        log2(math_s), log2(memory_s), log2(math_s / memory_s), log2(m * n * batch),
        log2(moved), log2(a_bytes), log2(b_bytes), log2(m / n), log2(tiled_s), log2(baseline_s),
        *(log2(each) for each in aligned), log2(worst),
    ]  # fmt: skip
    row += tiling
    row += _one_hot(dtype, _GEMM_DTYPES) + _one_hot(layout, _LAYOUTS)
    for each in (*aligned, worst):
        row += _one_hot(each, _ALIGNMENTS)
    return baseline_s, row


_CONV_DTYPES = ("bf16", "fp16", "tf32", "fp32")
_DIRECTIONS = (FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT)
_TAPS, _STEPS = (1, 2, 3, 4, 5, 7, 11), (1, 2, 4, 16)
_CASES = tuple(product(_DIRECTIONS, (False, True), (False, True), (False, True)))
#: Channels per group, as wide in as out, for which the library has Tensor Core kernels that take all groups
#: at once: on an H200 one such pass in seven ran group by group, of the others between three and six in ten
#: (more than four groups, more than one channel each; the kernels that ran in ``collect_h200.py``).
_PACKED_WIDTHS = (4, 8, 16, 32)
_GROUPINGS = ("one", "packed", "depthwise", "other")
_CHANNELS = (1, 2, 3, 4, 8, 16, 32, 64)
#: What the groups and the pass, and what the layout and a 1 x 1 kernel decide together.
_GROUPED = tuple(product(_DIRECTIONS, _GROUPINGS))
_POINTWISE = tuple(product((False, True), (False, True), _GROUPINGS))
#: Splits of the contraction that are looked at, and what adding the parts up takes beside their traffic.
_MOST_SPLITS = 512
_SPLIT_S = 1.5e-6


def _split(
    m: int, n: int, k: int, batch: int, size: int, peak: float, gpu: Gpu, tile: int
) -> tuple[float, int]:
    """The best time of a product in square tiles over the splits of its contraction, and that split."""
    blocks = ceil_div(m, tile) * ceil_div(n, tile) * batch
    stage = _STAGE_BYTES // size
    stages = ceil_div(k, stage)
    wave_s = gpu.sms * 2 * tile * tile * stage / (peak * _MATH_SHARE)
    added_s = m * n * batch * 2 / gpu.memory_bandwidth_bytes_per_s
    best, best_split, split = float("inf"), 1, 1
    while split <= max(1, min(_MOST_SPLITS, stages // 2)):
        time_s = ceil(blocks * split / gpu.sms) * (ceil_div(stages, split) + 3) * wave_s
        if split > 1:
            time_s += _SPLIT_S + added_s * (split + 1)
        if time_s < best:
            best, best_split = time_s, split
        split *= 2
    return best, best_split


def _grouping(op: Conv) -> str:
    channels_in, channels_out = op.in_channels // op.groups, op.out_channels // op.groups
    if op.groups == 1:
        return "one"
    if channels_in == channels_out and channels_in in _PACKED_WIDTHS:
        return "packed"
    return "depthwise" if channels_in == 1 else "other"


def _conv_paths(op: Conv, gpu: Gpu) -> list[float]:
    """What decides between the library's paths: groups, padded channels, split contractions, the image."""
    size, access = size_bytes(op.dtype), elements_per_access(op.dtype)
    channels_in, channels_out = op.in_channels // op.groups, op.out_channels // op.groups
    padded_in, padded_out = round_up(channels_in, access), round_up(channels_out, access)
    bandwidth, peak = gpu.memory_bandwidth_bytes_per_s, gpu.peak_flop_per_s(op.dtype)
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
    large_s, large_split = _split(m, n, k, matrix.batch // calls, size, peak, gpu, 128)
    small_s, small_split = _split(m, n, k, matrix.batch // calls, size, peak, gpu, 64)
    call_s = max(min(large_s, small_s), op.moved_bytes / calls / bandwidth / _MEMORY_SHARE) + _FIXED_S
    row += [
        log2(calls * large_s), log2(calls * small_s), log2(large_split), log2(small_split),
        log2(calls * call_s),
    ]  # fmt: skip
    # The product of one image, as NCHW has it in memory.
    taps = prod(op.kernel_size)
    if op.direction == BACKWARD_WEIGHT:
        m, n, k = channels_in * taps, channels_out, pixels_out
    elif op.direction == FORWARD:
        m, n, k = pixels_out, channels_out, channels_in * taps
    else:
        m, n, k = pixels_in, channels_in, channels_out * taps
    row.append(log2(_split(m, n, k, op.batch * op.groups, size, peak, gpu, 128)[0]))
    row += _one_hot(channels_in, _CHANNELS) + _one_hot(channels_out, _CHANNELS)
    row += _one_hot((op.direction, grouping), _GROUPED)
    row += _one_hot((op.channels_last, plain, grouping), _POINTWISE)
    return row


def conv(op: Conv, gpu: Gpu) -> Row:
    """A convolution pass: the equivalent product, and what gathering its operands costs."""
    size = size_bytes(op.dtype)
    access = elements_per_access(op.dtype)
    matrix = op.implicit_gemm
    peak = gpu.peak_flop_per_s(op.dtype)
    moved = op.moved_bytes
    channels_in, channels_out = op.in_channels // op.groups, op.out_channels // op.groups
    math_s = op.flop / peak
    memory_s = moved / gpu.memory_bandwidth_bytes_per_s
    tiled_s, tiling = _tiling(matrix.m, matrix.n, matrix.k, matrix.batch, size, peak, gpu)
    activations_s = size * (op.input_elements + op.output_elements) / gpu.memory_bandwidth_bytes_per_s
    narrow = op.groups > 1 and min(channels_in, channels_out) < access
    cuda_cores_s = op.flop / gpu.peak_flop_per_s("fp32")
    # A narrow group runs on CUDA cores; NCHW is converted to NHWC and back around a Tensor Core kernel.
    busy_s = 4 * cuda_cores_s if narrow else tiled_s
    converted_s = 0.0 if op.channels_last or narrow or op.dtype == "fp32" else 4 * activations_s
    baseline_s = max(busy_s, memory_s / _MEMORY_SHARE) + converted_s + _FIXED_S
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
    row += tiling
    row += _one_hot(op.dtype, _CONV_DTYPES) + _one_hot(op.direction, _DIRECTIONS)
    row += _one_hot(max(op.kernel_size), _TAPS) + _one_hot(step, _STEPS)
    for each in aligned:
        row += _one_hot(each, _ALIGNMENTS[:5])
    # What the library does depends on the pass, the layout and the alignment together.
    row += _one_hot((op.direction, op.channels_last, min(aligned) >= access, op.groups == 1), _CASES)
    return baseline_s, row + _conv_paths(op, gpu)


_BACKENDS = (CUDNN, FLASH, EFFICIENT, MATH_BACKEND)
_ATTENTION_DTYPES = ("bf16", "fp16", "fp32")
_QUERY_TILES = (64, 128)
_HEAD_WIDTHS = (64, 128, 256)


def attention(op: Attention, gpu: Gpu) -> Row:
    """A fused attention pass."""
    peak = gpu.peak_flop_per_s(op.dtype if op.dtype != "fp32" else "tf32")
    math_s = op.flop / peak
    memory_s = op.moved_bytes / gpu.memory_bandwidth_bytes_per_s
    width = next((w for w in _HEAD_WIDTHS if w >= op.head_dim), op.head_dim)
    padded_s = math_s * width / op.head_dim
    baseline_s = padded_s / 0.6 + memory_s / 0.6 + 2 * _FIXED_S
    heads = op.batch * op.num_heads
    row = [
        log2(op.batch), log2(op.num_heads), log2(op.num_kv_heads), log2(op.num_heads / op.num_kv_heads),
        log2(op.seq_len), log2(op.kv_len), log2(op.head_dim), log2(op.value_dim), log2(width / op.head_dim),
        float(op.is_causal), float(op.mask_bytes > 0), float(op.dropout_p > 0),
        float(op.direction == FORWARD), float(op.head_dim % 8 == 0), float(op.seq_len == 1),
        log2(heads), log2(math_s), log2(memory_s), log2(math_s / memory_s), log2(padded_s),
        log2(baseline_s), log2(op.scores), log2(1 + op.mask_bytes),
        log2(gcd(op.seq_len, 128)), log2(gcd(op.kv_len, 128)),
    ]  # fmt: skip
    for tile in _QUERY_TILES:
        for length in (op.seq_len, op.kv_len):
            blocks = heads * ceil_div(length, tile)
            waves = blocks / gpu.sms
            row += [log2(waves), ceil(waves) / waves if waves > _LEAST_WAVES else 0.0]
            row.append(log2(ceil_div(length, tile) * tile / length))
    row += _one_hot(backend(op, gpu)[0], _BACKENDS) + _one_hot(op.dtype, _ATTENTION_DTYPES)
    row += _one_hot(width, _HEAD_WIDTHS)
    return baseline_s, row


#: Functions that were measured; any other is described by its role alone.
_FUNCTIONS = """
    _foreach_add _foreach_addcdiv _foreach_addcmul _foreach_div _foreach_lerp _foreach_mul _foreach_sqrt
    _fused_rms_norm _fused_rms_norm_backward _log_softmax _log_softmax_backward_data _softmax
    _softmax_backward_data _to_copy add addcmul amax argmax avg_pool2d avg_pool2d_backward bernoulli cat clone
    constant_pad_nd cumsum div embedding embedding_dense_backward exp fill fused_adamw fused_sgd gather gelu
    gelu_backward hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward
    index_add index_select linalg_vector_norm masked_fill max_pool2d_with_indices
    max_pool2d_with_indices_backward mean mse_loss mul native_batch_norm native_batch_norm_backward
    native_dropout native_dropout_backward native_group_norm native_layer_norm native_layer_norm_backward neg
    nll_loss_backward nll_loss_forward pow relu roll select_backward sigmoid sigmoid_backward silu
    silu_backward slice_backward sort sum tanh threshold_backward topk where
""".split()
_STREAMING_DTYPES = ("bf16", "fp16", "fp32")
#: Rows and elements that one block of a reduction takes, about.
_BLOCK = 1024


def streaming(op: Streaming, gpu: Gpu) -> Row:
    """An operation that streams memory: its traffic, and how it is cut into rows."""
    moved = max(1, op.moved_bytes)
    memory_s = moved / gpu.memory_bandwidth_bytes_per_s
    baseline_s = memory_s / _MEMORY_SHARE + op.kernels * _FIXED_S
    elements = max(1, op.elements)
    inner = op.inner or 1
    outer = max(1.0, elements / inner)
    size = size_bytes(op.dtype)
    row = [
        log2(elements), log2(1 + op.read_bytes), log2(1 + op.write_bytes), log2(moved), log2(memory_s),
        log2(baseline_s), op.read_bytes / (elements * size), op.write_bytes / (elements * size),
        log2((1 + op.read_bytes) / (1 + op.write_bytes)), log2(inner), log2(outer), float(op.inner > 0),
        log2(outer / gpu.sms), log2(gcd(inner * size, LINE_BYTES)), log2(gcd(elements * size, LINE_BYTES)),
        log2(elements / _BLOCK / gpu.sms), log2(max(1.0, inner / _BLOCK)), log2(moved / gpu.l2_bytes),
        float(moved > gpu.l2_bytes), float(op.strided), log2(op.kernels), float(op.kernels > 1), float(size),
        log2(max(1.0, outer / gpu.sms)), float(inner * size % 16 == 0), float(elements * size % 16 == 0),
    ]  # fmt: skip
    row += _one_hot(op.role, ROLES) + _one_hot(op.dtype, _STREAMING_DTYPES)
    row += _one_hot(op.function, _FUNCTIONS)
    return baseline_s, row


#: By the class of the operation.
FEATURES: dict[type[Op], Callable[..., Row]] = {
    Gemm: gemm,
    Conv: conv,
    Attention: attention,
    Streaming: streaming,
}


def domain(op: Op) -> str:
    """What must have been measured for the fitted model to speak: the role, or the element type."""
    return op.role if isinstance(op, Streaming) else op.dtype
