"""Time of fused attention."""

from __future__ import annotations

from math import gcd, log2

from tilefit.cost.analytic import estimates, from_datasheet
from tilefit.cost.constants import Constants
from tilefit.cost.estimate import Estimate
from tilefit.cost.features import FIXED_S, Row, describes, one_hot, quantization
from tilefit.cost.gemm import estimate_gemm
from tilefit.cost.launch import counts
from tilefit.cost.memory import moved_s
from tilefit.cost.streaming import estimate_streaming
from tilefit.cost.tables import facts
from tilefit.cost.tiles import ceil_div, round_up
from tilefit.gpus import Gpu
from tilefit.ops import FORWARD, Attention, Gemm, StepOp, Streaming
from tilefit.ops.dtypes import HALVES, size_bytes

CUDNN = "cudnn"
FLASH = "flash"
EFFICIENT = "efficient"
MATH_BACKEND = "math"

#: What was measured of them, with the sources.
_KNOWN = facts("attention")
#: What tells passes apart for the networks.
_BACKENDS = (CUDNN, FLASH, EFFICIENT, MATH_BACKEND)
_DTYPES = ("bf16", "fp16", "fp32")
_QUERY_TILES = (64, 128)
_HEAD_WIDTHS = (64, 128, 256)


def backend(op: Attention, gpu: Gpu) -> tuple[str, str]:
    """The backend PyTorch's ``scaled_dot_product_attention`` chooses, and why not a faster one.

    Source: pytorch/pytorch ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (2.9 to 2.14, cuDNN
    above 9.15): cuDNN first on capability 9.0 and 10.0, then flash, memory-efficient, math.
    """
    half = op.dtype in HALVES
    capability = gpu.compute_capability
    square = op.head_dim == op.value_dim
    if capability in ((9, 0), (10, 0)) and half and square and op.head_dim % 8 == 0 and op.head_dim <= 256:
        return CUDNN, ""
    if capability >= (8, 0) and half and square and op.head_dim <= 256 and not op.mask_bytes:
        return FLASH, ""
    if not half:
        missing = f"{op.dtype} operands"
    elif capability < (8, 0):
        missing = f"{gpu.name} is older than Ampere"
    elif op.mask_bytes:
        missing = "an explicit mask"
    else:
        missing = f"head sizes {op.head_dim} and {op.value_dim}"
    if op.dtype in ("fp16", "fp32", "tf32") or (op.dtype == "bf16" and capability >= (8, 0)):
        return EFFICIENT, missing
    return MATH_BACKEND, missing


@estimates(Attention)
def estimate_attention(op: Attention, gpu: Gpu, constants: Constants) -> Estimate:
    """Predicted time of a fused attention pass."""
    name, missing = backend(op, gpu)
    reason = f"{name} attention" + (f" because of {missing}" if missing else "")
    fixed_s, spread = _KNOWN.fixed_kernels * constants.kernel_s(gpu), _KNOWN.spread
    if name == MATH_BACKEND:
        (math_s, memory_s), fixed_s, spread = _unfused(op, gpu, constants), 0.0, 2 * spread
    else:
        math_s = _math_s(op, gpu, name)
        memory_s = moved_s(op.moved_bytes, gpu, constants) / _KNOWN.memory_share
    # The sum, not the larger: fitted as a p-norm, the best p was 1.1.
    parts = {"math_s": math_s, "memory_s": memory_s, "busy_s": math_s + memory_s}
    time_s = math_s + memory_s + fixed_s
    return from_datasheet(op, gpu, time_s, spread, **parts, kernel_family=name, reason=reason)


def _math_s(op: Attention, gpu: Gpu, name: str) -> float:
    """What the products and the exponentials take in a backend."""
    backward, share = op.direction != FORWARD, _KNOWN.shares[name]
    if name != CUDNN and gpu.architecture in ("hopper", "blackwell"):
        share *= _KNOWN.without_wgmma
    if backward:
        share *= _KNOWN.backward
    width = next((w for w in _KNOWN.widths if w >= op.head_dim), op.head_dim)
    clock_hz = gpu.boost_clock_hz
    per_clock = gpu.peak_flop_per_s(op.dtype) / (gpu.sms * clock_hz) * share
    # Products for one pair of a query and a key, four FLOP for each element of the head in the forward pass.
    passes = op.flop / (4 * op.scores * op.head_dim)
    pair_clocks = 4 * passes * width / per_clock + 1 / _KNOWN.exponentials
    rows = op.batch * op.num_heads * round_up(op.seq_len, _KNOWN.query_tile)
    row_clocks = _KNOWN.row_clocks * (_KNOWN.backward_rows if backward else 1)
    clocks = op.scores * pair_clocks + rows * row_clocks
    # However few the blocks, one of them meets every key, on one SM.
    last_clocks = min(_KNOWN.query_tile, op.seq_len) * op.kv_len * pair_clocks
    busiest: float = max(clocks / gpu.sms, last_clocks)
    return busiest / clock_hz


def _unfused(op: Attention, gpu: Gpu, constants: Constants) -> tuple[float, float]:
    """What products take and the softmax between them, one after another, the scores in memory."""
    heads = op.batch * op.num_heads
    scores = heads * op.seq_len * op.kv_len
    scores_bytes = scores * size_bytes(op.dtype)
    product = Gemm(op.seq_len, op.kv_len, op.head_dim, op.dtype, "TN", heads)
    weighted = Gemm(op.seq_len, op.value_dim, op.kv_len, op.dtype, "NN", heads)
    softmax = Streaming("softmax", scores, scores_bytes, scores_bytes, op.dtype, inner=op.kv_len)
    passes = 1 if op.direction == FORWARD else 2
    math_s = passes * sum(estimate_gemm(each, gpu, constants).time_s for each in (product, weighted))
    # Softmax, scaling and mask each read and write the scores.
    return math_s, passes * 2 * estimate_streaming(softmax, gpu, constants).time_s


@counts(Attention)
def count_attention(op: Attention, gpu: Gpu, entry: StepOp) -> int:
    """Before the forward kernel two constants and a choice between them make numbers of a mask of booleans,
    and another kernel hands over the state of dropout's random numbers."""
    if op.direction != FORWARD:
        return op.kernels
    return op.kernels + 3 * any(ref.dtype == "bool" for ref in entry.inputs) + bool(op.dropout_p)


@describes(Attention(2, 6, 200, 72, dtype="fp16"))
def attention_features(op: Attention, gpu: Gpu) -> Row:
    """What the networks see of a fused attention pass."""
    peak = gpu.peak_flop_per_s(op.dtype if op.dtype != "fp32" else "tf32")
    math_s = op.flop / peak
    memory_s = op.moved_bytes / gpu.memory_bandwidth_bytes_per_s
    width = next((w for w in _HEAD_WIDTHS if w >= op.head_dim), op.head_dim)
    padded_s = math_s * width / op.head_dim
    baseline_s = padded_s / 0.6 + memory_s / 0.6 + 2 * FIXED_S
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
            blocks = ceil_div(length, tile)
            row += (*quantization(heads * blocks, gpu.sms), log2(blocks * tile / length))
    row += one_hot(backend(op, gpu)[0], _BACKENDS) + one_hot(op.dtype, _DTYPES)
    row += one_hot(width, _HEAD_WIDTHS)
    return baseline_s, row
