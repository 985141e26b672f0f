"""PyTorch's element types by tilefit's names."""

from __future__ import annotations

import torch

from tilefit.ops.dtypes import NAMES, canonical

#: By every name that is known here and that PyTorch has one for.
BY_NAME: dict[str, torch.dtype] = {
    name: dtype for name in NAMES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
#: tilefit's name of each; of fp8 there are several.
DTYPES = {dtype: canonical(name) for name, dtype in BY_NAME.items()}
#: What autocast may cast to.
AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def product_dtype(dtype: torch.dtype, tf32: bool) -> str:
    """The type that products of these elements multiply in, where fp32 may be rounded to ``tf32``."""
    return "tf32" if tf32 and dtype == torch.float32 else DTYPES[dtype]
