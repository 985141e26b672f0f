"""Inputs by specification: ``input_ids: int64[16,1024]``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from tilefit.capture.dtypes import DTYPES
from tilefit.errors import UsageError

_SPEC = re.compile(r"^\s*(?:(?P<name>[A-Za-z_]\w*)\s*:)?\s*(?P<dtype>\w+)\s*\[(?P<shape>[^\]]*)\]\s*$")
_BY_NAME: dict[str, torch.dtype] = {
    **{str(dtype).removeprefix("torch."): dtype for dtype in DTYPES},
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
    "float": torch.float32,
    "half": torch.float16,
    "long": torch.int64,
    "int": torch.int32,
}


def parse_inputs(specs: Sequence[str], device: str = "meta") -> Any:
    """Tensors as specified: a mapping if the inputs are named, else a tuple of positional arguments.

    Args:
        specs: Such as ``["input_ids: int64[16,1024]"]`` or ``["float32[32,3,224,224]"]``.
        device: ``meta`` for shapes alone; on ``cpu`` floating-point inputs are normal, integers 0 or 1.

    Raises:
        UsageError: a specification is not of that form.
    """
    named: dict[str, torch.Tensor] = {}
    positional: list[torch.Tensor] = []
    for spec in specs:
        match = _SPEC.match(spec)
        if match is None:
            raise UsageError(
                f"cannot read the input {spec!r}",
                hint='Write a name, an element type and sizes: --input "input_ids: int64[16,1024]".',
            )
        dtype = _BY_NAME.get(match["dtype"])
        if dtype is None:
            known = ", ".join(sorted(str(d).removeprefix("torch.") for d in DTYPES))
            raise UsageError(
                f"unknown element type {match['dtype']!r} in the input {spec!r}", hint=f"Use one of: {known}."
            )
        tensor = make(_sizes(match["shape"], spec), dtype, device)
        if match["name"]:
            if match["name"] in named:
                raise UsageError(f"the input {match['name']!r} is given twice")
            named[match["name"]] = tensor
        else:
            positional.append(tensor)
    if named and positional:
        raise UsageError(
            "some inputs have a name and some have none", hint="Name all of them, or none (positional)."
        )
    return named or tuple(positional)


def _sizes(text: str, spec: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size) for size in text.split(",")) if text.strip() else ()
    except ValueError:
        sizes = (-1,)
    if any(size < 1 for size in sizes):
        raise UsageError(f"the sizes in the input {spec!r} are not positive whole numbers")
    return sizes


def make(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A tensor of this shape: without data on ``meta``, with harmless data elsewhere."""
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    if dtype.is_floating_point:
        return torch.randn(shape, device=device).to(dtype)
    return torch.randint(0, 2, shape, device=device).to(dtype)
