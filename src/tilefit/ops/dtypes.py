"""Element types: their names, sizes and the sizes Tensor Cores like."""

from __future__ import annotations

from math import gcd

from tilefit.errors import UsageError

# Bits per element. ``tf32`` is a way to multiply fp32 storage, so it is as wide as fp32.
_BITS: dict[str, int] = {
    "fp64": 64,
    "fp32": 32,
    "tf32": 32,
    "fp16": 16,
    "bf16": 16,
    "fp8": 8,
    "int64": 64,
    "int32": 32,
    "int16": 16,
    "int8": 8,
    "uint8": 8,
    "uint16": 16,
    "uint32": 32,
    "uint64": 64,
    "bool": 8,
    "complex32": 32,
    "complex64": 64,
    "complex128": 128,
}

_ALIASES = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "float8_e4m3fnuz": "fp8",
    "float8_e5m2fnuz": "fp8",
    "float8_e8m0fnu": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "int": "int32",
    "long": "int64",
}

#: All names that an element type has.
NAMES = (*_ALIASES, *_BITS)
#: Types of 16 bits.
HALVES = ("fp16", "bf16")

# The width of one Tensor Core / TMA access, in bytes, and of a full cache line.
# Source: NVIDIA, "Matrix Multiplication Background", Tensor Core requirements.
ALIGNMENT_BYTES = 16
LINE_BYTES = 128


def canonical(name: str) -> str:
    """The project's short name of an element type (``"bfloat16"`` -> ``"bf16"``).

    Raises:
        UsageError: the name is not known.
    """
    short = _ALIASES.get(name, name)
    if short not in _BITS:
        known = ", ".join(sorted(_BITS))
        raise UsageError(f"unknown element type {name!r}", hint=f"Use one of: {known}.")
    return short


def size_bytes(name: str) -> int:
    """Bytes of one element."""
    return _BITS[name] // 8


def elements_per_access(name: str) -> int:
    """Elements in 16 bytes: 8 in fp16/bf16, 4 in fp32/TF32, 16 in int8/fp8, 2 in fp64."""
    return ALIGNMENT_BYTES // size_bytes(name)


def alignment_bytes(elements: int, dtype: str) -> int:
    """Largest power of two that divides a leading dimension in bytes, at most a line of 128."""
    return gcd(elements * size_bytes(dtype), LINE_BYTES)
