"""TF32 for fp32 products: PyTorch's switches of the whole program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

_backends: Any = torch.backends
#: The newer ones: of matrix products, convolutions, recurrent layers. The older ones set them, too, and
#: cannot be read once somebody used these.
_SWITCHES = (_backends.cuda.matmul, _backends.cudnn.conv, _backends.cudnn.rnn)


def multiplies_in_tf32() -> tuple[bool, bool]:
    """Whether fp32 matrices are multiplied in TF32 now, and convolutions computed."""
    matmul, conv, _ = (each.fp32_precision == "tf32" for each in _SWITCHES)
    return matmul, conv


def allow_tf32(wanted: bool) -> Callable[[], None]:
    """Turn it on or off; what is returned takes that back."""
    before = [each.fp32_precision for each in _SWITCHES]
    _set(wanted, wanted)
    return partial(_restore, before)


def _restore(before: Sequence[str]) -> None:
    matmul, conv, _ = (each == "tf32" for each in before)
    _set(matmul, conv)
    for switch, precision in zip(_SWITCHES, before, strict=True):
        switch.fp32_precision = precision


def _set(matmul: bool, conv: bool) -> None:
    # By the older switches: who reads these meanwhile finds what was set.
    _backends.cuda.matmul.allow_tf32, _backends.cudnn.allow_tf32 = matmul, conv
