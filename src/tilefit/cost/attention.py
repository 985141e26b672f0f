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
from tilefit.cost.tiles import ceil_div, round_up
from tilefit.gpus import Gpu
from tilefit.ops import FORWARD, Attention, Gemm, StepOp, Streaming
from tilefit.ops.dtypes import HALVES, size_bytes

CUDNN = "cudnn"
FLASH = "flash"
EFFICIENT = "efficient"
MATH_BACKEND = "math"

#: Query rows that one thread block takes.
_QUERY_TILE = 128
#: Share of the Tensor Core peak at which the two products run, by backend, beside the exponentials, with
#: which they overlap in part; so it may be above 1. cudnn: fitted on FlashAttention 3 (H100 and H200,
#: 17,936 shapes each), which the cuDNN kernels match. flash: FlashAttention 2 reaches 73 % of an A100
#: forward, softmax included (Dao, arXiv 2307.08691), and 35 % of an H100 (Shah et al., arXiv 2407.08608).
#: efficient: about half of flash (the same figures, CUTLASS-based rows).
_SHARES = {CUDNN: 1.12, FLASH: 0.97, EFFICIENT: 0.40}
#: The mma.sync kernels of flash and efficient reach half of that share of a Hopper or Blackwell peak.
_WITHOUT_WGMMA = 0.5
#: Exponentials per clock and SM beside the products: what makes heads of 32 and 64 as much slower than those
#: of 128 (0.45 and 0.70 of the rate), and those of 192 as much faster (1.14), as they were fitted to be. The
#: special function units make 16.
_EXPONENTIALS_PER_CLOCK_PER_SM = 12.0
#: Clocks of a query's row beside its keys, of rows that are padded to whole tiles: between what public times
#: of causal passes on an H100 and an H200 want (4), and the profile of an H200 of those of vision models (8).
_ROW_CLOCKS = 7.0
#: Of the backward pass, over that (the same profile).
_BACKWARD_ROWS = 5.0
#: Widths of the kernels' heads, to which a head is padded.
_WIDTHS = (32, 64, 96, 128, 192, 256)
#: Backward over forward rate: 63 % against 73 % of an A100 (arXiv 2307.08691).
_BACKWARD = 0.86
#: Queries, keys and values are read in many small pieces (fitted likewise).
_MEMORY_SHARE = 0.56
#: Fixed time over that of a plain kernel: the call of a serving framework, 10 us at one query (fitted
#: likewise), so on the high side for PyTorch's own.
_FIXED_KERNELS = 4.5
_SPREAD = 0.35
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
    if name == MATH_BACKEND:
        return _unfused(op, gpu, constants, reason)
    share = _SHARES[name]
    if name != CUDNN and gpu.architecture in ("hopper", "blackwell"):
        share *= _WITHOUT_WGMMA
    if op.direction != FORWARD:
        share *= _BACKWARD
    width = next((w for w in _WIDTHS if w >= op.head_dim), op.head_dim)
    clock_hz = gpu.boost_clock_hz
    per_clock = gpu.peak_flop_per_s(op.dtype) / (gpu.sms * clock_hz) * share
    # Products for one pair of a query and a key, four FLOP for each element of the head in the forward pass.
    passes = op.flop / (4 * op.scores * op.head_dim)
    pair_clocks = 4 * passes * width / per_clock + 1 / _EXPONENTIALS_PER_CLOCK_PER_SM
    rows = op.batch * op.num_heads * round_up(op.seq_len, _QUERY_TILE)
    clocks = op.scores * pair_clocks + rows * _ROW_CLOCKS * (1 if op.direction == FORWARD else _BACKWARD_ROWS)
    # However few the blocks, one of them meets every key, on one SM.
    last_clocks = min(_QUERY_TILE, op.seq_len) * op.kv_len * pair_clocks
    math_s = max(clocks / gpu.sms, last_clocks) / clock_hz
    memory_s = moved_s(op.moved_bytes, gpu, constants) / _MEMORY_SHARE
    # The sum, not the larger: fitted as a p-norm, the best p was 1.1.
    parts = {"math_s": math_s, "memory_s": memory_s, "busy_s": math_s + memory_s}
    time_s = math_s + memory_s + _FIXED_KERNELS * constants.kernel_s(gpu)
    return from_datasheet(op, gpu, time_s, _SPREAD, **parts, kernel_family=name, reason=reason)


def _unfused(op: Attention, gpu: Gpu, constants: Constants, reason: str) -> Estimate:
    """The math backend: products and softmax one after another, the scores in memory."""
    heads = op.batch * op.num_heads
    scores = heads * op.seq_len * op.kv_len
    scores_bytes = scores * size_bytes(op.dtype)
    product = Gemm(op.seq_len, op.kv_len, op.head_dim, op.dtype, "TN", heads)
    weighted = Gemm(op.seq_len, op.value_dim, op.kv_len, op.dtype, "NN", heads)
    softmax = Streaming("softmax", scores, scores_bytes, scores_bytes, op.dtype, inner=op.kv_len)
    passes = 1 if op.direction == FORWARD else 2
    math_s = passes * sum(estimate_gemm(each, gpu, constants).time_s for each in (product, weighted))
    # Softmax, scaling and mask each read and write the scores.
    memory_s = passes * 2 * estimate_streaming(softmax, gpu, constants).time_s
    parts = {"math_s": math_s, "memory_s": memory_s, "busy_s": math_s + memory_s}
    time_s = math_s + memory_s
    return from_datasheet(op, gpu, time_s, 2 * _SPREAD, **parts, kernel_family=MATH_BACKEND, reason=reason)


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
