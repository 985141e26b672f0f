"""How large half-precision gradients are: a histogram of exponents, and the loss scales they allow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilefit.precision.dtypes import PRODUCTS
from tilefit.precision.look import Call, Observer, is_plain

#: Exponents from 2^LOWEST on have a bin each; the first bin holds zeros as well as what is smaller.
LOWEST = -40
BINS = 64
#: Elements looked at of each gradient.
SAMPLE = 4096
#: fp16: the exponent of the smallest subnormal number, of the smallest normal one, and of the largest.
SMALLEST, NORMAL, LARGEST = -24, -14, 15
#: Bits kept free above the largest gradient seen, and the share of gradients that may be lost below.
HEADROOM = 2
TAIL = 0.01

_BACKWARD = PRODUCTS | frozenset(
    """convolution_backward native_layer_norm_backward native_group_norm_backward native_batch_norm_backward
    _scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward""".split()
)


class Exponents(Observer):
    """Counts the exponents of the half-precision gradients of matrix products and normalisations.

    Attributes:
        counts: Values by exponent, per element type: a tensor of ``BINS + 1`` numbers on the device, of which
        the
            first counts zeros.
    """

    def __init__(self) -> None:
        self.counts: dict[torch.dtype, Tensor] = {}
        self.step: dict[torch.dtype, list[float]] = {}
        self._before: dict[torch.dtype, Tensor] = {}

    def wants(self, func: Any, name: str) -> bool:
        return name in _BACKWARD

    def after(self, call: Call) -> None:
        if not call.backward or call.look.recomputes:
            return
        outs = call.out if isinstance(call.out, list | tuple) else [call.out]
        for out in outs:
            if isinstance(out, Tensor) and out.dtype in (torch.float16, torch.bfloat16) and is_plain(out):
                self._count(out)

    def _count(self, gradient: Tensor) -> None:
        flat = gradient.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLE)].float().abs()
        exponent = torch.frexp(sample).exponent - 1
        place = (exponent - LOWEST).clamp(0, BINS - 1) + 1
        place = torch.where(sample == 0, 0, place)
        counts = torch.zeros(BINS + 1, device=gradient.device).scatter_add_(
            0, place.long(), torch.isfinite(sample).float()
        )
        known = self.counts.get(gradient.dtype)
        self.counts[gradient.dtype] = counts if known is None else known + counts

    def read(self, dtype: torch.dtype) -> list[float]:
        """The histogram of an element type so far; waits for the device."""
        counts = self.counts.get(dtype)
        return counts.tolist() if counts is not None else []

    def fp16(self) -> tuple[int, float, float]:
        """Values seen in fp16, and the shares of them that are subnormal and zero; waits for the device."""
        counts = self.read(torch.float16)
        total = sum(counts)
        if not total:
            return 0, 0.0, 0.0
        subnormal = sum(counts[1 : NORMAL - LOWEST + 1])
        return int(total), subnormal / total, counts[0] / total


def scale_interval(counts: list[float], scale: float) -> tuple[int, int] | None:
    """The loss scales, as powers of two, that fp16 gradients allow.

    Args:
        counts: A histogram of the gradients' exponents, zeros first.
        scale: The loss scale they carry.

    Returns:
        Lowest and highest exponent of a scale: with the lowest, all but 1 % of the gradients that are not
        zero stay above fp16's smallest number; with the highest, the largest one stays two bits below 65504.
        The interval is empty where the lowest exceeds the highest. None where nothing was counted.
    """
    total = sum(counts[1:])
    if not total:
        return None
    carried = torch.log2(torch.tensor(scale)).item()
    present = [index for index, count in enumerate(counts[1:]) if count]
    below, tail = 0.0, present[0]
    for index in present:
        below += counts[1 + index]
        if below > TAIL * total:
            tail = index
            break
    lowest = SMALLEST - (tail + LOWEST - carried)
    highest = LARGEST - HEADROOM - (present[-1] + LOWEST - carried)
    return round(lowest), round(highest)
