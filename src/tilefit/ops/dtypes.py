"""Element types: their names, sizes and the sizes Tensor Cores like."""

from __future__ import annotations

from math import gcd

from tilefit.errors import UsageError

#: Bits of an element. ``tf32`` is a way to multiply fp32 storage, so it is as wide as fp32.
_BITS = {
    name: bits
    for bits, names in {
        64: "fp64 int64 uint64 complex64",
        32: "fp32 tf32 int32 uint32 complex32",
        16: "fp16 bf16 int16 uint16",
        8: "fp8 int8 uint8 bool",
        128: "complex128",
    }.items()
    for name in names.split()
}
#: Other names of these.
_ALIASES = {
    alias: name
    for name, aliases in {
        "fp64": "float64 double",
        "fp32": "float32 float",
        "fp16": "float16 half",
        "bf16": "bfloat16",
        "fp8": "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu fp8_e4m3 fp8_e5m2",
        "int32": "int",
        "int64": "long",
    }.items()
    for alias in aliases.split()
}
#: All names that an element type has.
NAMES = (*_ALIASES, *_BITS)
#: Types of 16 bits.
HALVES = ("fp16", "bf16")
#: Floating-point types that values are in.
FLOATS = ("fp64", "fp32", *HALVES)
#: Types that Tensor Cores multiply, in units of 16 bytes.
TENSOR_CORE_DTYPES = (*HALVES, "tf32", "fp8", "int8")

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
