"""PyTorch's element types by tilefit's names."""

from __future__ import annotations

import torch

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.float8_e4m3fnuz: "fp8",
    torch.float8_e5m2fnuz: "fp8",
    torch.float8_e8m0fnu: "fp8",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.uint16: "uint16",
    torch.uint32: "uint32",
    torch.uint64: "uint64",
    torch.bool: "bool",
    torch.complex32: "complex32",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}

#: What autocast may cast to.
AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def product_dtype(dtype: torch.dtype, tf32: bool) -> str:
    """The type that products of these elements multiply in, where fp32 may be rounded to ``tf32``."""
    return "tf32" if tf32 and dtype == torch.float32 else DTYPES[dtype]
