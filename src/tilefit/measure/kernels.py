"""What a kernel's name says about it.

Inferred from names of kernels that ran on an H200 (CUDA 13.0). What else the names of products say is read by
``benchmarks/kernels.py``.
"""

from __future__ import annotations

import re

_ARCH = re.compile(r"(?:cutlass(?:3x)?_(?:sm)?|\bsm|_sm)(70|75|80|86|89|90|100|120)_")
_GENERATION = {"86": "sm80", "89": "sm80", "120": "sm100"}
_NAMED_GENERATION = (("hopper_", "sm90"), ("ampere_", "sm80"), ("turing_", "sm75"), ("volta_", "sm70"))
#: The shape of one ``mma`` in a name, behind a letter for what it sums up in, and the generation it came with
#: (PTX ISA): ``s1688gemm`` is Turing's in fp16, and Ampere's in TF32 and bf16; ``d884`` is Ampere's.
_MMA = re.compile(
    r"(?:^|[_a-z])([shdibt]?)(16816|16832|16864|161616|1688|8816|884)(?=gemm|tf32|bf16|cudnn|_|\b|[fdw](?:prop|grad))"
)
_MMA_GENERATION = {"161616": "sm70", "1688": "sm75", "8816": "sm75", "884": "sm70"}
_FP16 = re.compile("(?<!b)fp?16")
_SIMT = ("simt", "ffma", "sgemm", "dgemm")
_VECTOR = ("gemv", "gemmsn", "gemmk1", "dot_kernel")
_ATTENTION = ("flash", "fmha", "mem_eff", "attention", "sdpa")


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


def family(name: str) -> str:
    """A kernel's family by its name, demangled or short; empty where that says nothing.

    As :class:`tilefit.cost.estimate.Estimate` names them: ``smXX``, the generation of the Tensor Core path,
    ``simt``, the plain arithmetic units, ``gemv``, a matrix-vector product, ``flash`` or ``cudnn-attention``.
    """
    low = name.lower()
    if any(word in low for word in _ATTENTION):
        return "cudnn-attention" if "cudnn" in low else "flash"
    if nvjet := re.search(r"nvjet_(?:(sm\d+)_)?", name):
        return nvjet[1] or "sm90"
    if any(word in low for word in _VECTOR):
        return "gemv"
    if any(word in low for word in _SIMT) and "tensorop" not in low:
        return "simt"
    for prefix, generation in _NAMED_GENERATION:
        if prefix in low:
            return generation
    arch = _ARCH.search(low)
    if arch:
        return _GENERATION.get(arch[1], f"sm{arch[1]}")
    return (
        mma_generation(low) if "tensorop" in low else ""
    )  # cuDNN's CUTLASS kernels name only their instruction


def mma_generation(low: str) -> str:
    """The generation of the ``mma`` that a name in small letters speaks of; empty where it speaks of none."""
    found = _MMA.search(low)
    if not found:
        return ""
    is_amperes = found[2].startswith("16") and found[1] != "h" and not _FP16.search(low)
    return "sm80" if is_amperes or found[1] == "d" else _MMA_GENERATION.get(found[2], "sm80")
