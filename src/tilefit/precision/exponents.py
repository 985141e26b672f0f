"""How large half-precision gradients are: a histogram of exponents, and the loss scales they allow."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import log2
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tilefit.precision.graph import Kind
from tilefit.precision.ledger import Stepped, Tracker
from tilefit.precision.look import Observer, function_of
from tilefit.precision.rules.autocast import UnscaledFp16
from tilefit.precision.tensors import HALF, is_plain, name_of, sampled
from tilefit.report.watched import Table
from tilefit.units import share

#: Elements looked at of each gradient, and about as many operations in a step, others in the next one.
SAMPLE = 1024
OPERATIONS = 24
#: fp16: the exponent of the smallest subnormal number, of the smallest normal one, and of the largest.
SMALLEST, NORMAL, LARGEST = -24, -14, 15
#: Bits kept free above the largest gradient seen, and the share of gradients that may be lost below.
HEADROOM = 2
TAIL = 0.01
#: fp32's largest exponent, and numbers below its smallest that stand for values that have none.
_HIGHEST, _ZERO, _NOT_FINITE = 127, -150, -151

#: Nodes of the autograd graph, without the number at the end.
_NODES = frozenset(
    """MmBackward AddmmBackward BmmBackward BaddbmmBackward AddbmmBackward LinearBackward MkldnnLinearBackward
    ConvolutionBackward NativeLayerNormBackward NativeGroupNormBackward NativeBatchNormBackward
    CudnnBatchNormBackward ScaledDotProductFlashAttentionBackward ScaledDotProductEfficientAttentionBackward
    ScaledDotProductCudnnAttentionBackward ScaledDotProductFlashAttentionForCpuBackward""".split()
)


@dataclass(slots=True)
class Histogram:
    """How many gradient values have which size, the loss scale divided out.

    Attributes:
        zeros: Values that are exactly zero.
        counts: The others, by the exponent of their size: 2^e <= |g| < 2^(e + 1).
    """

    zeros: int = 0
    counts: Counter[int] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """All of them."""
        return self.zeros + self.counts.total()

    def scale_interval(self) -> tuple[int, int] | None:
        """The loss scales, as powers of two, that fp16 gradients of these sizes allow.

        Returns:
            Lowest and highest exponent of a scale: with the lowest, all but 1 % of the gradients that are not
            zero stay above fp16's smallest number; with the highest, the largest one stays two bits below
            65504. The interval is empty where the lowest exceeds the highest. None where nothing but zeros
            was seen.
        """
        below, lost = 0, TAIL * self.counts.total()
        for exponent in sorted(self.counts):
            below += self.counts[exponent]
            if below > lost:
                return SMALLEST - exponent, LARGEST - HEADROOM - max(self.counts)
        return None


class Exponents(Tracker, Observer):
    """Counts the exponents of the half-precision gradients that matrix products, normalisations and Functions
    of the user's give.

    Attributes:
        histograms: What was seen, by element type.
    """

    def set_up(self) -> None:
        self.histograms: dict[torch.dtype, Histogram] = {}
        #: Of this step, on the device.
        self._samples: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._seen = self._first = 0
        self._step = 1

    def wants_node(self, node: Any, kind: Kind) -> bool:
        name, dtype = kind
        return function_of(node) is not None or (dtype in HALF and name.rstrip("0123456789") in _NODES)

    def hook(self, node: Any) -> RemovableHandle | None:
        self._seen += 1
        return node.register_hook(self._gave) if self._seen % self._step == self._first else None

    def _gave(self, gradients: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]) -> None:
        for gradient in gradients:
            if gradient is not None and gradient.dtype in HALF and is_plain(gradient):
                with torch._C._DisableTorchDispatch():  # no mode is to see this, nor one of the user's
                    sample = sampled(gradient.detach(), SAMPLE).clone()
                self._samples.setdefault((gradient.dtype, gradient.device), []).append(sample)

    def _count(self, wanted: torch.dtype) -> Histogram:
        """This step's values of an element type, scale included; waits for the device."""
        found = Histogram()
        for samples in [self._samples[key] for key in list(self._samples) if key[0] == wanted]:
            values = torch.cat(samples).float()
            # Short numbers, as they are sorted faster.
            exponents = (torch.frexp(values).exponent.short() - 1).where(values.isfinite(), _NOT_FINITE)
            ordered = exponents.where(values != 0, _ZERO).sort().values
            # Counted by where each exponent begins: one read of a fixed size, whatever was seen.
            begins = torch.arange(_ZERO, _HIGHEST + 2, dtype=ordered.dtype, device=ordered.device)
            zeros, *counts = torch.searchsorted(ordered, begins).diff().tolist()
            found.zeros += zeros
            found.counts.update({_ZERO + 1 + i: count for i, count in enumerate(counts) if count})
        return found

    def on_stepped(self, stepped: Stepped) -> None:
        """Say how values lie in fp16 that went through it without a scale; waits for the device."""
        cycle = self._ledger.here.cycle
        if not (stepped.plain and cycle.fp16 and not cycle.hand_scaled):
            return
        found = self._count(torch.float16)
        total = max(1, found.total)
        low = sum(count for exponent, count in found.counts.items() if exponent < NORMAL) / total
        what = {"number": found.total, "subnormal": low, "zero": found.zeros / total}
        self.found(UnscaledFp16, cycle.passes[-1].source, **what)

    def tables(self) -> list[Table]:
        """What loss scales the gradients seen allow, a table for each element type."""
        tables = []
        for dtype, seen in self.histograms.items():
            if (allowed := seen.scale_interval()) is None:
                continue
            lowest, highest = allowed
            advice = f"in fp16 a loss scale from 2^{lowest} to 2^{highest} fits them"
            if lowest > highest:
                advice = "no loss scale keeps 99 % of them above zero in fp16 and all below 65504: use bf16"
            elif lowest <= 0 <= highest:
                advice += "; 1 is among them, so they need none"
            sizes = f"2^{min(seen.counts)} to 2^{max(seen.counts)}"
            row = (name_of(dtype), str(seen.total), share(seen.zeros / seen.total), sizes, advice)
            title = "Half-precision gradients, the loss scale divided out"
            tables.append(Table(title, ("type", "values", "zero", "sizes", "advice"), (row,)))
        return tables

    def end(self) -> None:
        carried = round(log2(self._recorder.scale or 1.0))
        for dtype in {dtype for dtype, _ in list(self._samples)}:
            found = self._count(dtype)
            histogram = self.histograms.setdefault(dtype, Histogram())
            histogram.zeros += found.zeros
            histogram.counts.update({e - carried: count for e, count in found.counts.items()})
        self._samples.clear()
        self._step = max(1, -(-self._seen // OPERATIONS))
        self._first = (self._first + 1) % self._step
        self._seen = 0
