"""Which family of kernels the library runs a product with, by the alignment of its operands.

Only leading dimensions count: the distance between the rows (or columns) of each operand as it lies in
memory. The dimension that is contiguous nowhere (m of ``a @ b``) may be odd at no cost.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from tilefit.cost.tables import toml
from tilefit.cost.tiles import SMALL_TILES, SPLITS, TILES, Tile
from tilefit.gpus import Gpu
from tilefit.ops import Gemm
from tilefit.ops.dtypes import ALIGNMENT_BYTES, LINE_BYTES, TENSOR_CORE_DTYPES, size_bytes
from tilefit.ops.gemm import Operand

SM80 = "sm80"
SIMT = "simt"

_FP64_CAPABILITIES = ((8, 0), (9, 0), (10, 0))

#: Families whose kernels fetch tiles by TMA, which demands rows of 16 bytes; a misaligned product falls to
#: the sm80 family.
_TMA = ("sm90", "sm100")

#: Rate at which the L2 hands operands to a multiprocessor [bytes per clock], which limits small tiles: 47 on
#: the A100 by NVIDIA's whitepaper. With 45, dense NHWC convolutions take 1.06 times what the H200's networks
#: say in the median (653 forward passes of timm's models, 0.90 to 1.27 from the 10th to the 90th percentile).
#: Before Ampere less: DeepBench's convolutions on V100 and T4, each of which takes it over from the other.
#: TMA hands what it fetched to several.
_FEED_BYTES_PER_CLOCK_PER_SM = 45.0
_FEED_BEFORE_AMPERE = 16.0
#: A misaligned operand is fetched in smaller pieces, and the instructions that fetch it become the limit: so
#: many FLOP per clock and SM remain, whatever the Tensor Cores could do. By element size and bytes of
#: alignment, for layouts whose forward operand B is a transposed view (``TN``), unless C alone is misaligned,
#: and for the others; the sources are in ``data/constants.toml``.
_MISALIGNED = toml("constants")["misaligned"]
CEILINGS = {(size, aligned): (tn, others) for size, aligned, tn, others in _MISALIGNED["ceilings"]}
#: Bytes arrive slower as well, in pieces. By bytes of alignment, per clock and SM.
_MISALIGNED_BYTES_PER_CLOCK_PER_SM = dict(_MISALIGNED["fetched"])
#: A leading dimension of whole 128-byte lines beats one of 16 bytes by a few per cent (the H200's vocabulary
#: table: 50264 against 50304 columns, +4 %).
_PARTIAL_LINE = 0.97


class Kernel(NamedTuple):
    """The kernels a product runs on.

    Attributes:
        family: ``simt`` without Tensor Cores, else after the generation the kernels are written for:
            ``sm70``, ``sm80``, ``sm90`` (TMA and wgmma), ``sm100``, ``sm120``.
        reason: One sentence.
        ceiling_flop_per_clock_per_sm: What fetching misaligned operands leaves; 0 where nothing is lost.
        math_share: Share of the family's math rate that the alignment leaves otherwise.
        bytes_per_clock_per_sm: The most that a multiprocessor fetches from the memory.
        misaligned: Name of the operand that decided (``A``, ``B``, ``C``); empty where all are aligned.
        alignment_bytes: Largest power of two, at most 128, that divides every leading dimension in bytes.
        feed_bytes_per_clock_per_sm: Rate at which operands reach a multiprocessor.
        tiles, splits: Tiles of the output, and how many blocks may share one's contraction, that there are.
    """

    family: str
    reason: str
    ceiling_flop_per_clock_per_sm: float = 0.0
    math_share: float = 1.0
    bytes_per_clock_per_sm: float = inf
    misaligned: str = ""
    alignment_bytes: int = LINE_BYTES
    feed_bytes_per_clock_per_sm: float = inf
    tiles: tuple[Tile, ...] = TILES
    splits: tuple[int, ...] = SPLITS

    @property
    def is_fed(self) -> bool:
        """Whether threads fetch the operands from the L2 cache, not TMA."""
        return self.feed_bytes_per_clock_per_sm < inf

    def ceiling(self, rows: int, columns: int, size: int) -> float:
        """The most FLOP per clock and SM that a tile reaches, of elements of so many bytes: for each element
        of the contraction it multiplies ``rows x columns`` pairs and is fed ``rows + columns`` elements."""
        fed = self.feed_bytes_per_clock_per_sm * 2 * rows * columns / ((rows + columns) * size)
        return min(fed, self.ceiling_flop_per_clock_per_sm or inf)


def uses_tensor_cores(dtype: str, gpu: Gpu) -> bool:
    """Whether products of this element type run on the GPU's Tensor Cores."""
    if not gpu.supports(dtype) or gpu.compute_capability < (7, 0):
        return False
    # fp64 Tensor Cores are those of the data-centre parts from Ampere on.
    return dtype in TENSOR_CORE_DTYPES or (dtype == "fp64" and gpu.compute_capability in _FP64_CAPABILITIES)


def feed(gpu: Gpu) -> float:
    """Bytes per clock at which operands reach a multiprocessor whose threads fetch them."""
    return _FEED_BYTES_PER_CLOCK_PER_SM if gpu.compute_capability >= (8, 0) else _FEED_BEFORE_AMPERE


def on_cuda_cores(gpu: Gpu, reason: str) -> Kernel:
    """What runs a product of a type that has Tensor Cores where the library does not use them."""
    ceiling = gpu.peak_flop_per_s("fp32") / (gpu.sms * gpu.boost_clock_hz)
    return Kernel(SIMT, reason, ceiling)


def _aligned_bytes(operand: Operand, gemm: Gemm) -> int:
    """What the distance between an operand's rows is a multiple of; one row needs none."""
    across = {"A": "mk", "B": "kn", "C": "mn"}[operand.name].replace(operand.contiguous, "")
    alone = getattr(gemm, across) == gemm.batch == 1
    return LINE_BYTES if alone else operand.alignment_bytes


def select(gemm: Gemm, gpu: Gpu) -> Kernel:
    """The kernels that run a product."""
    if not uses_tensor_cores(gemm.dtype, gpu):
        missing = "fp32 runs" if gemm.dtype == "fp32" else f"{gpu.name} multiplies {gemm.dtype}"
        return Kernel(SIMT, f"{missing} on CUDA cores, not on Tensor Cores")
    worst = min(gemm.operands, key=lambda operand: _aligned_bytes(operand, gemm))
    worst_bytes = _aligned_bytes(worst, gemm)
    native = f"sm{gpu.compute_capability[0]}0"
    size = size_bytes(gemm.dtype)
    fed = inf if native in _TMA else feed(gpu)
    aligned = Kernel(
        native,
        "all leading dimensions are multiples of 16 bytes",
        math_share=1.0 if worst_bytes == LINE_BYTES else _PARTIAL_LINE,
        alignment_bytes=worst_bytes,
        feed_bytes_per_clock_per_sm=fed,
        tiles=SMALL_TILES if gemm.batch > 1 else TILES,
    )
    if worst_bytes >= ALIGNMENT_BYTES or size == 8:
        return aligned
    rows = f"{worst.name} has rows of {worst.leading_dimension} elements"
    if "misaligned products" in gpu.lacks:
        return on_cuda_cores(gpu, f"{rows}, which this cuBLAS does not run on Tensor Cores")
    family = SM80 if native in _TMA else native
    # C may have narrower elements than A and B.
    tn, other = CEILINGS[size, max(worst_bytes, size)]
    reason = (
        f"{rows} ({worst.contiguous} is contiguous), "
        f"a multiple of {worst_bytes} bytes where {ALIGNMENT_BYTES} are needed"
    )
    if gemm.dtype == "fp8":  # PyTorch, _scaled_mm's own check
        reason += ": torch._scaled_mm refuses that; the time assumes what 2-byte elements lose"
    elif family != native:
        reason += f": no {native} kernel can do that, older ones can"
    return aligned._replace(
        family=family,
        reason=reason,
        ceiling_flop_per_clock_per_sm=tn if gemm.layout == "TN" and worst.name != "C" else other,
        bytes_per_clock_per_sm=_MISALIGNED_BYTES_PER_CLOCK_PER_SM[worst_bytes],
        misaligned=worst.name,
    )
