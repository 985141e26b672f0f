"""Other ways to run the same product: operands stored otherwise, padded copies; when the copies pay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import hypot, inf

from tilefit.cost.estimate import Estimate
from tilefit.cost.model import estimate
from tilefit.cost.priced import PricedGpu, priced
from tilefit.cost.tiles import round_up
from tilefit.gpus import Gpu
from tilefit.ops import Gemm, Streaming
from tilefit.ops.dtypes import elements_per_access, size_bytes

_OTHER = {"N": "T", "T": "N"}
#: Types that PyTorch multiplies in one layout.
_ONE_LAYOUT = ("fp8", "int8")


@dataclass(frozen=True, slots=True)
class Interval:
    """A predicted quantity and its 80 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to run a product.

    Attributes:
        what: What is done, such as ``B transposed``.
        gemm: The product that runs then.
        estimate: Its time.
        copies: What has to be copied for it, with the time of each copy, by operand (``A``, ``B``). C is
            written wider and used as a view: nothing is copied.
        saving_s: Time saved by the product alone; the errors of the two estimates are taken as independent.
    """

    what: str
    gemm: Gemm
    estimate: Estimate
    copies: tuple[tuple[str, Estimate], ...]
    saving_s: Interval

    @property
    def copy_s(self) -> float:
        """Time of all the copies, once."""
        return sum(time.time_s for _, time in self.copies)

    @property
    def uses(self) -> Interval:
        """After how many products the copies are paid; infinite where the saving may be none.

        0 without copies. What is copied for each product pays if this is below 1.
        """
        if not self.copies:
            return Interval(0.0, 0.0, 0.0)
        low_s, high_s = (sum(getattr(time, end) for _, time in self.copies) for end in ("low_s", "high_s"))
        saving = self.saving_s
        return Interval(*map(_ratio, (self.copy_s, low_s, high_s), (saving.value, saving.high, saving.low)))


def alternatives(gemm: Gemm, gpu: Gpu | str) -> tuple[Alternative, ...]:
    """What else would compute a product, fastest first: each operand transposed, misaligned ones padded.

    A copy of an operand that is stored once and used often (a weight) is paid after :attr:`Alternative.uses`
    products, such as a recurrent layer's time steps; of one that is new for every product (an activation) it
    is part of each.

    Raises:
        UsageError: no GPU has this name.
    """
    device = priced(gpu)
    of_b, of_a = gemm.layout[0], gemm.layout[1]
    layouts = {} if gemm.dtype in _ONE_LAYOUT else {"A": of_b + _OTHER[of_a], "B": _OTHER[of_b] + of_a}
    found = [
        _alternative(f"{name} transposed", gemm, replace(gemm, layout=layout), name, device)
        for name, layout in layouts.items()
    ]
    wide = _padded(gemm)
    if wide != gemm:
        grown = [name for name in ("m", "n", "k") if getattr(wide, name) > getattr(gemm, name)]
        sizes = ", ".join(f"{name} = {getattr(wide, name)}" for name in grown)
        copied = "".join(name for name, own in (("A", "mk"), ("B", "kn")) if {*own} & {*grown})
        found.append(_alternative(f"padded to {sizes}", gemm, wide, copied, device))
    return tuple(sorted(found, key=lambda each: each.estimate.time_s))


def _padded(gemm: Gemm) -> Gemm:
    """The product with every contiguous dimension rounded up to whole 16-byte accesses."""
    access = elements_per_access(gemm.dtype)
    sizes = {
        operand.contiguous: round_up(getattr(gemm, operand.contiguous), access) for operand in gemm.operands
    }
    return replace(gemm, **sizes)  # type: ignore[arg-type]


def _alternative(what: str, gemm: Gemm, then: Gemm, copied: str, gpu: PricedGpu) -> Alternative:
    now, after = estimate(gemm, gpu), estimate(then, gpu)
    saving_s = now.time_s - after.time_s
    saving = Interval(
        saving_s,
        saving_s - hypot(now.time_s - now.low_s, after.high_s - after.time_s),
        saving_s + hypot(now.high_s - now.time_s, after.time_s - after.low_s),
    )
    transposed = then.layout != gemm.layout
    copies = tuple((name, estimate(_copy(gemm, name, transposed=transposed), gpu)) for name in copied)
    return Alternative(what, then, after, copies, saving)


def _copy(gemm: Gemm, operand: str, *, transposed: bool) -> Streaming:
    """The copy of an operand; transposed, its reads or its writes are not coalesced."""
    elements = gemm.batch * gemm.k * (gemm.m if operand == "A" else gemm.n)
    moved = elements * size_bytes(gemm.dtype)
    dtype = "fp32" if gemm.dtype == "tf32" else gemm.dtype
    return Streaming("copy", elements, moved, moved, dtype, strided=transposed, function="clone")


def _ratio(cost: float, saving: float) -> float:
    return cost / saving if saving > 0 else inf
