"""What a kernel's name says about it.

The ``nvjet`` grammar is inferred from names of GEMMs of known shape profiled on an H200 (CUDA 13.0);
the CUTLASS and ``xmma`` names follow their generators.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

#: Kernel families, as :class:`tilefit.cost.estimate.Estimate` names them. ``smXX`` is the generation of
#: the Tensor Core path, ``simt`` the plain arithmetic units, ``gemv`` a matrix-vector product.
FAMILIES = ("sm100", "sm90", "sm80", "sm75", "sm70", "simt", "gemv", "flash", "cudnn-attention")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel as its name describes it.

    Attributes:
        name: The short name (see :func:`short_name`).
        family: One of :data:`FAMILIES`; empty where the name says nothing.
        tile: Output tile as (rows of C, columns of C) of the row-major product; None where not named.
        tile_k: Depth of one pipeline stage; 0 where not named.
        stages: Pipeline stages; 0 where not named.
        cluster: Thread blocks of a cluster as (rows, columns) of the row-major product.
        split_k: The contraction is split over thread blocks.
        layout: The letters cuBLAS sees (first the column-major A, PyTorch's second operand); may be empty.
        align: Elements of one access that the kernel was built for; 0 where not named.
    """

    name: str
    family: str = ""
    tile: tuple[int, int] | None = None
    tile_k: int = 0
    stages: int = 0
    cluster: tuple[int, int] = (1, 1)
    split_k: bool = False
    layout: str = ""
    align: int = 0


_NVJET = re.compile(
    r"nvjet(?:_(?P<arch>sm\d+))?_(?P<types>[a-z0-9]+)_(?P<a>\d+)x(?P<b>\d+)_(?P<k>\d+)x(?P<stages>\d+)"
    r"(?:_(?P<cluster_a>\d+)x(?P<cluster_b>\d+))?(?P<rest>\w*)"
)
_CUTLASS = re.compile(
    r"cutlass(?:3x)?_\w*?_(?P<a>\d+)x(?P<b>\d+)(?:_(?P<k>\d+)x(?P<stages>\d+)|x(?P<k3>\d+))?"
    r"_(?:\w+_)?(?P<layout>[nt]{2,3}|nhwc|nchw)(?:_align(?P<align>\d+))?"
)
_XMMA = re.compile(
    r"sm\d+_xmma_\w*?_(?P<layout>[nt]{2})_\w*?tilesize(?P<a>\d+)x(?P<b>\d+)x(?P<k>\d+)(?:_stage(?P<stages>\d+))?"
)
_NAMED = re.compile(
    r"(?:gemm|fprop|dgrad|wgrad)\w*?_(?P<a>\d{2,3})x(?P<b>\d{2,3})\w*?_(?P<layout>[nt]{2})(?:_|$)"
)
_ARCH = re.compile(r"(?:cutlass(?:3x)?_(?:sm)?|\bsm|_sm)(70|75|80|86|89|90|100|120)_")
_GENERATION = {"86": "sm80", "89": "sm80", "120": "sm100"}
_NAMED_GENERATION = (("hopper_", "sm90"), ("ampere_", "sm80"), ("turing_", "sm75"), ("volta_", "sm70"))
_MMA_GENERATION = (
    ("16816", "sm80"),
    ("16832", "sm80"),
    ("161616", "sm80"),
    ("1688", "sm80"),
    ("884", "sm70"),
)
_SIMT = ("simt", "ffma", "sgemm", "dgemm")
_VECTOR = ("gemv", "gemmsn", "gemmk1", "dot_kernel")
_ATTENTION = ("flash", "fmha", "mem_eff", "attention", "sdpa")
# What runs beside the kernel that does the work: clearing a counter, adding up the parts of a split.
_HELPERS = ("splitkreduce", "memset", "memcpy", "reduce_1block", "scal_kernel")


def short_name(name: str) -> str:
    """The telling part of a demangled kernel name: template arguments and namespaces removed.

    ``void cutlass::Kernel2<cutlass_80_tensorop_...>(...)`` becomes ``cutlass_80_tensorop_...``.
    """
    inner = re.search(r"(cutlass\w*_(?:tensorop|simt)_\w+|nvjet_\w+|\bsm\d{2,3}_xmma_\w+)", name)
    if inner:
        return inner.group(1)
    # A return type may be a template with brackets of its own.
    text = re.sub(r"^std::enable_if<.*?>::type ", "", name).removeprefix("void ")
    text = text.replace("(anonymous namespace)", "anonymous").split("(")[0]
    head, _, arguments = text.partition("<")
    parts = head.split("::")
    head = "::".join(parts[-2:]) if parts[-1].lower() == "kernel" else parts[-1]
    # Most of PyTorch's own kernels are one template; its functor tells them apart.
    functor = re.search(r"(\w*(?:Functor|Ops|Op|_kernel_cuda|kernel_impl)\w*)", arguments)
    return f"{head}<{functor.group(1)}>" if functor else head


def main_kernel(launches: Sequence[tuple[str, float]]) -> str:
    """The name of the kernel that does a call's work: the longest that is no helper.

    Args:
        launches: Name and duration of each kernel of the call; not empty.
    """
    workers = [launch for launch in launches if not any(word in launch[0].lower() for word in _HELPERS)]
    return max(workers or launches, key=lambda launch: launch[1])[0]


def parse(name: str) -> Kernel:
    """Read a kernel's name, demangled or short."""
    short = short_name(name)
    low = name.lower()
    if any(word in low for word in _ATTENTION):
        return Kernel(name=short, family="cudnn-attention" if "cudnn" in low else "flash")
    nvjet = _NVJET.search(short)
    if nvjet:
        letters = re.search(r"_([NT]{2})[NT](?:_|$)", nvjet["rest"])
        return Kernel(
            name=short,
            family=nvjet["arch"] or "sm90",
            # cuBLAS m x n, and cuBLAS m is the column of the row-major product.
            tile=(int(nvjet["b"]), int(nvjet["a"])),
            tile_k=int(nvjet["k"]),
            stages=int(nvjet["stages"]),
            cluster=(int(nvjet["cluster_b"] or 1), int(nvjet["cluster_a"] or 1)),
            split_k="splitK" in nvjet["rest"],
            layout=letters[1] if letters else "",
        )
    family, split_k = _family(low), "splitk" in low or "split_k" in low
    found = _CUTLASS.search(short) or _NAMED.search(short)
    if found:
        groups = found.groupdict()
        layout = groups["layout"].upper()
        return Kernel(
            name=short,
            family=family,
            tile=(int(groups["b"]), int(groups["a"])),
            tile_k=int(groups.get("k") or groups.get("k3") or 0),
            stages=int(groups.get("stages") or 0),
            split_k=split_k,
            layout=layout[:2] if set(layout) <= {"N", "T"} else "",
            align=int(groups.get("align") or 0),
        )
    xmma = _XMMA.search(short)
    if xmma:
        return Kernel(
            name=short,
            family=family,
            # These name rows first: on an H200 a product of many rows and 16 columns runs 128x32.
            tile=(int(xmma["a"]), int(xmma["b"])),
            tile_k=int(xmma["k"]),
            stages=int(xmma["stages"] or 0),
            split_k=split_k,
            layout=xmma["layout"].upper(),
        )
    return Kernel(name=short, family=family, split_k=split_k)


def _family(low: str) -> str:
    if any(word in low for word in _VECTOR):
        return "gemv"
    if any(word in low for word in _SIMT) and "tensorop" not in low:
        return "simt"
    for prefix, family in _NAMED_GENERATION:
        if prefix in low:
            return family
    arch = _ARCH.search(low)
    if arch:
        return _GENERATION.get(arch[1], f"sm{arch[1]}")
    if "tensorop" in low:  # cuDNN's CUTLASS kernels name only their instruction
        return next((family for shape, family in _MMA_GENERATION if shape in low), "")
    return ""


def fell_off(kernel: Kernel, dtype: str, compute_capability: tuple[int, int]) -> bool:
    """Whether a product ran on an older generation's path than the GPU has.

    Only for 16-bit and 8-bit products on Hopper, where an aligned product always runs ``nvjet``. In TF32
    aligned products run ``sm80`` kernels too, so the name says nothing.
    """
    if compute_capability[0] != 9 or dtype in ("tf32", "fp32", "fp64"):
        return False
    return kernel.family in ("sm80", "sm75", "sm70", "simt")
