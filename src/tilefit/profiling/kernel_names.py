"""Whether a kernel used the Tensor Cores, and of which generation its code is, told from its name.

Where the words are from:

- ``nvjet_…``: cuBLAS's kernels since Hopper, as profiles of an H200 name them (CUDA 13.0).
- ``…_tensorop_…``, ``…_simt_…``, ``…Gmma…``, ``MainloopSm90…``: CUTLASS (``tools/library``, and the template
  arguments of its version 3); ``simt`` are the CUDA cores, ``gmma`` Hopper's ``wgmma``.
- ``s16816``, ``h884``, ``i16832``, ``d884``: a letter for the accumulator and the shape of one ``mma``
  instruction (PTX ISA), in the names of cuBLAS and cuDNN from Volta to Ampere. ``sgemm``, ``hgemm``,
  ``dgemm`` and ``scudnn`` without such a shape multiply on the CUDA cores.
- ``sm80_xmma_…``: cuBLAS's and cuDNN's generated kernels, built of ``mma`` instructions.
- ``flash_fwd_…``, ``fmha_cutlassF_…_sm80``: the attentions in PyTorch (``aten/src/ATen/native/transformers/
  cuda``). ``FlashAttnFwdSm90`` is FlashAttention 3; ``…_wgmma`` are cuDNN's.
- ``triton_poi_``, ``triton_red_``, ``triton_per_``, ``triton_for_``, ``triton_tem_``: Inductor's pointwise,
  reducing, persistent reducing and combined kernels, and its templates of products.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from tilefit.measure.kernels import family, mma_generation, short_name

_TENSOR = re.compile(
    r"nvjet|tensorop|wgmma|gmma|hmma|imma|tcgen05|umma|_xmma_(?!.*simt)|triton_tem_|triton_mm|triton_bmm"
    r"|mainloopsm(?:80|90|100|120)|flashattn(?:fwd|bwd)sm(?:80|90|100)"
    r"|flash_fwd(?:_splitkv)?_kernel|flash_bwd_dq_dk_dv"
)
#: Kernels beside the one that multiplies, and kernels whose words would deceive.
_HELPER = re.compile(
    r"splitkreduce|splitk_reduce|_combine_kernel|dot_do_o|convert_dq|convert_dkv|nchwtonhwc|nhwctonchw"
    r"|flashattn(?:bwd)?(?:preprocess|postprocess)|flashattnfwdcombine|prepare_grouped_gemm|kern_precompute"
    r"|winograd|fft"
)
_CUDA_CORES = re.compile(
    r"simt|[sdhc]gemm|scudnn|hcudnn|implicit_convolve|conv_depthwise|depthwise|gemv|gemmsn|gemmk1|dot_kernel"
    r"|triton_(?:poi|red|per|for)_|at::native|at::cuda|elementwise|reduce_kernel|softmax|norm|cub::|thrust::"
    r"|nccl|nvshmem|memcpy|memset|fill|embedding|multi_tensor_apply|cudnn::(?:bn|ops|pooling)|dropout"
)
_FMHA = re.compile(r"fmha_cutlass[fb]_(f16|bf16|f32)_\w*?sm(\d+)")
_COMMUNICATION = re.compile(r"^nccl|nvshmem|multimem_|one_shot_all_reduce|two_shot_all_reduce")
_GENERATION = re.compile(r"mainloopsm(\d+)|flashattn(?:fwd|bwd)sm(\d+)")


@dataclass(frozen=True, slots=True)
class KernelName:
    """What a name says.

    Attributes:
        short: The telling part of the name.
        tensor_core: The kernel multiplies on the Tensor Cores; None where the name does not tell.
        generation: The architecture its code was written for (``sm90``, ``sm80``, …); empty where unknown.
        communication: It moves data between GPUs.
    """

    short: str
    tensor_core: bool | None
    generation: str = ""
    communication: bool = False


@cache
def read_name(name: str) -> KernelName:
    """What the demangled or short name of a kernel says."""
    low = name.lower()
    short = short_name(name)
    if _COMMUNICATION.search(low):
        return KernelName(short, False, communication=True)
    tensor_core = _tensor_core(low)
    return KernelName(short, tensor_core, _generation(name, low) if tensor_core else "")


def older_path(kernel: KernelName, compute_capability: tuple[int, int]) -> bool:
    """Whether a Tensor Core kernel was written for an older generation than the GPU's.

    Only code for Hopper uses Hopper's asynchronous products (``wgmma``), without which the full rate is out
    of reach. Where the name does not tell the generation, this does not say that it is old.
    """
    if not kernel.generation or compute_capability[0] < 9:
        return False
    return int(kernel.generation.removeprefix("sm")) < 10 * compute_capability[0]


def _tensor_core(low: str) -> bool | None:
    if _HELPER.search(low):
        return False
    fmha = _FMHA.search(low)
    if fmha:
        # In fp32 the CUTLASS attention multiplies in TF32 parts, from Ampere on.
        return int(fmha[2]) >= (80 if fmha[1] == "f32" else 70)
    if _TENSOR.search(low) or mma_generation(low):
        return "_simt_" not in low
    return False if _CUDA_CORES.search(low) else None


def _generation(name: str, low: str) -> str:
    if "wgmma" in low or "gmma" in low:
        return "sm90"
    found = _GENERATION.search(low)
    if found:
        return f"sm{found[1] or found[2]}"
    fmha = _FMHA.search(low)
    if fmha:
        return f"sm{fmha[2]}"
    if "flash_fwd" in low or "flash_bwd" in low:
        return "sm80"
    kind = family(name)
    return kind if kind.startswith("sm") else mma_generation(low)
