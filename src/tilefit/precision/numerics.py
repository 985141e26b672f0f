"""Arithmetic on the data seen: half-precision operations are repeated in fp32 on samples of their own input;
where inf and NaN come from, in one step with every operation checked; and how large half-precision gradients
are, and the loss scales they allow.

Nothing waits for the device while the step runs: what was measured stays there, and is read once at its end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import log2
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tilefit.precision.graph import Kind
from tilefit.precision.ledger import Stepped, Tracker
from tilefit.precision.look import FORWARD, OPEN, RECOMPUTED, Call, Observer, function_of
from tilefit.precision.recorder import Recorder
from tilefit.precision.rules.autocast import UnscaledFp16
from tilefit.precision.rules.base import SIGNIFICAND_BITS
from tilefit.precision.rules.numerics import (
    IntegerCollapse,
    MaskOverflow,
    NonFiniteOrigin,
    NormOverflow,
    ReductionInHalf,
)
from tilefit.precision.tensors import HALF, Notes, has_values, is_plain, name_of, sampled, tensors_in
from tilefit.report.watched import Table
from tilefit.units import share

#: Elements looked at of an operation's input, and of a table of integers.
SAMPLE = 65536
RUN = 8192
#: So many values in order are no accident.
LINE = 8
#: Calls of one operation on one line that are looked at, per step.
CALLS = 2
#: Spacing relative to the value, and the smallest normal number, by element type.
_EPS = {dtype: torch.finfo(dtype).eps for dtype in HALF}
_SMALLEST = {dtype: torch.finfo(dtype).smallest_normal for dtype in HALF}

_POINTWISE = frozenset("pow square exp log rsqrt sqrt reciprocal".split())
#: What is made of sums by these is still repeated in fp32; and what makes much of how they were rounded.
_CHAIN = frozenset("pow square mul sub rsub add neg abs clamp clamp_min div sqrt".split())
_ROOTS = frozenset("sqrt rsqrt reciprocal".split())
#: An error of a chain below this, in units of the last place, is that of its operands.
_CHAIN_ERROR_ULP = 64.0
#: Operations through which a mask stays one, and a table a table.
_PASSING = frozenset(
    "view _unsafe_view expand unsqueeze slice select clone permute transpose t add_ sub_ copy_".split()
)
_NORMS = ("linalg_vector_norm", "norm", "_foreach_norm")
#: What an operation that was repeated is judged by.
_FIGURES = ("overflowed", "vanished", "error_ulp", "largest")
_REDUCTIONS = frozenset(
    "sum mean var var_mean norm linalg_vector_norm cumsum prod logsumexp _softmax _log_softmax".split()
)
#: What positions and steps go into; what else is made of whole numbers survives the rounding of some.
_ANGLES = frozenset("mm addmm bmm baddbmm mkldnn_linear linear sin cos sin_ cos_ outer ger distance".split())
_TABLES = frozenset("index index_select embedding gather take".split())
_SCALED = frozenset("mul div mul_ div_ cat stack _to_copy".split())


class _Mask(NamedTuple):
    """A sum that may be a mask.

    Attributes:
        first: Which of the sums it is made of gave -inf of finite terms first, on the device; -1 for none.
        sources: The lines of these.
        dtype: Of the last.
    """

    first: Tensor
    sources: tuple[str, ...]
    dtype: torch.dtype


class Shadows(Tracker, Observer):
    """Repeats risky operations in fp32, looks for merged integers and for masks that overflow."""

    phases = (FORWARD, OPEN, RECOMPUTED)

    def set_up(self) -> None:
        #: Measurements on each device, and what says what they show.
        self._pending: defaultdict[torch.device, list[tuple[Tensor, Callable[[list[float]], None]]]]
        self._pending = defaultdict(list)
        self._calls: Counter[tuple[str, str]] = Counter()
        #: The first rows of sums, and of what is made of sums, in fp32 from the start; and the line of a
        #: difference, which loses digits.
        self._wide: Notes[tuple[Tensor, str]] = Notes()
        self._masks: Notes[_Mask] = Notes()
        #: What is made of values that were cast to half precision, and what each of these has gone into.
        self._tables: Notes[list[set[str]]] = Notes()

    def wants(self, func: Any, name: str) -> bool:
        tables = (_REPEATED, _HANDLERS, _ANGLES, _TABLES, _SCALED, _CHAIN, ("arange", "_foreach_norm"))
        return any(name in names for names in tables)

    def after(self, call: Call) -> None:
        name, first, out = call.name, call.args[0] if call.args else None, call.out
        if self._tables:
            self._use(call)
        if name == "arange":
            self._cast(call, out)
        elif name == "_foreach_norm":
            self._norms(call)
        if not isinstance(first, Tensor) or not isinstance(out, Tensor):
            return
        if name in _CHAIN and not self._wide.keys().isdisjoint(map(id, call.args)):
            self._chain(call, out)
        # What passes masks on matters where there are some; what autocast has made an fp32 softmax, always.
        handler = _HANDLERS.get(name) if self._masks or name not in _PASSING else None
        half = name in _REPEATED and first.dtype in HALF and out.dtype in HALF
        if (handler or half) and is_plain(first) and first.numel():
            if handler:
                handler(self, call, first)
            if half:
                _REPEATED[name](self, call, first, out)

    def end(self) -> None:
        for same in self._pending.values():
            read = iter(torch.cat([numbers for numbers, _ in same]).tolist())
            for numbers, shows in same:
                shows(list(islice(read, numbers.numel())))
        for kept in (self._pending, self._calls, self._wide, self._masks, self._tables):
            kept.clear()

    def _ask(self, numbers: Sequence[Tensor], shows: Callable[[list[float]], None]) -> None:
        """Have numbers of a device read at the step's end, and what they show said."""
        self._pending[numbers[0].device].append((torch.stack([number.float() for number in numbers]), shows))

    def met(self, model: nn.Module) -> None:
        """Look for tables of whole numbers among a model's half-precision buffers that have merged already.

        ``model.bfloat16()`` casts buffers too. Waits for the device.
        """
        for name, buffer in model.named_buffers():
            if buffer.dtype not in HALF or not is_plain(buffer):
                continue
            values = buffer.detach().reshape(-1)[:SAMPLE].float()
            steps, number = values.diff(), values.numel()
            largest = float(values.abs().max()) if number else 0.0
            if min(number, largest) <= 2 ** SIGNIFICAND_BITS[name_of(buffer.dtype)]:
                continue
            if bool((values == values.floor()).all() & (steps >= 0).all() & (steps == 0).any()):
                what = {"dtype": name_of(buffer.dtype), "integral": True, "largest": largest}
                left = int((steps > 0).sum()) + 1
                self.found(IntegerCollapse, "", name, before=number, after=left, **what)

    # ---- shadow operations -----------------------------------------------------------------

    def _pointwise(self, call: Call, x: Tensor, out: Tensor) -> None:
        if out.shape != x.shape or isinstance(call.args[1] if len(call.args) > 1 else 0, Tensor):
            return
        if not self._counts(call):
            return
        known = self._wide.of(x) if call.name in _ROOTS or call.name == "log" else None
        if known is not None:
            self._compare(call, call.func(known[0]), _head(out, known[0]), chain=True, source=known[1])
            return
        if x.stride() != out.stride():
            x, out = x.contiguous(), out.contiguous()
        self._compare(call, call.func(sampled(x, SAMPLE).float(), *call.args[1:]), sampled(out, SAMPLE))

    def _sigmoid(self, call: Call, x: Tensor, out: Tensor) -> None:
        if self._counts(call):
            self._wide.note(out, (torch.sigmoid(_head(x).float()), ""))

    def _product(self, call: Call, x: Tensor, out: Tensor) -> None:
        """A product of two tensors, a square say, may overflow."""
        other = call.args[1]
        same = isinstance(other, Tensor) and other.shape == x.shape == out.shape and other.dtype in HALF
        if same and x.stride() == other.stride() == out.stride() and self._counts(call):
            wide = sampled(x, SAMPLE).float() * sampled(other, SAMPLE).float()
            self._compare(call, wide, sampled(out, SAMPLE), chain=True)

    def _chain(self, call: Call, out: Tensor) -> None:
        """Go on in fp32 with what was made of sums."""
        known = [made for t in call.tensors() if (made := self._wide.of(t)) is not None]
        if not known or out.dtype not in HALF:
            return
        like, source = known[0]
        args: list[Any] = list(call.args)
        for index, arg in enumerate(args):
            if not isinstance(arg, Tensor):
                continue
            made = self._wide.of(arg)
            if made is None and arg.numel() > 1 and (arg.ndim != out.ndim or len(arg) != len(out)):
                return
            args[index] = made[0] if made else (arg if arg.numel() == 1 else _head(arg, like)).float()
        source = call.source if call.name in ("sub", "rsub") else source
        self._wide.note(out, (call.func(*args, **call.kwargs), source))

    def _reduction(self, call: Call, x: Tensor, out: Tensor) -> None:
        rows = _rows(call, x, out) if self._counts(call) else None
        if rows is None:
            return
        kwargs = {k: v for k, v in call.kwargs.items() if k != "dtype"}
        wide = call.func(rows[0].float(), *call.args[1:], **kwargs)
        self._compare(call, wide, rows[1])
        if isinstance(wide, Tensor):
            self._wide.note(out, (wide, ""))

    def _norms(self, call: Call) -> None:
        """The norms of many tensors, as clipping takes them of gradients."""
        tensors, order = call.args[0], call.args[1] if len(call.args) > 1 else 2
        pairs = [pair for pair in zip(tensors, call.out, strict=True) if pair[0].dtype in HALF]
        pairs = [(x, out) for x, out in pairs if is_plain(x) and x.numel() and out.dtype == pairs[0][1].dtype]
        if pairs and pairs[0][1].dtype in HALF and self._counts(call):
            wide = [torch.linalg.vector_norm(x, order, dtype=torch.float32) for x, _ in pairs]
            self._compare(call, torch.stack(wide), torch.stack([out for _, out in pairs]))

    def _compare(
        self, call: Call, wide: Tensor, out: Tensor, *, chain: bool = False, source: str = ""
    ) -> None:
        """See how far an operation's result is from what fp32 gives."""
        got, dtype, good = out.float(), out.dtype, torch.isfinite(wide)
        overflowed = (good & ~torch.isfinite(got)).float().mean()
        vanished = ((got == 0) & (wide != 0) & good).float().mean()
        spacing = wide.abs().clamp_min(_SMALLEST[dtype]) * _EPS[dtype]
        error = torch.where(good & torch.isfinite(got), (wide - got).abs() / spacing, 0.0).max()
        largest = torch.where(good, wide.abs(), 0.0).max()
        if chain or call.name not in _POINTWISE:
            # A value below the smallest normal number is allowed to vanish in a sum or a softmax.
            vanished = torch.zeros_like(vanished)
        if chain:
            error = error * (error > (_CHAIN_ERROR_ULP if call.name in _ROOTS else float("inf")))
        rule = NormOverflow if call.name in _NORMS else ReductionInHalf
        rounded = " of rounded values" if chain and call.name in _POINTWISE else ""
        what = {"operation": call.name + rounded, "dtype": name_of(dtype)}
        place = source or call.source, call.module

        def shows(read: list[float]) -> None:
            self.found(rule, *place, **what, **dict(zip(_FIGURES, read, strict=True)))

        self._ask((overflowed, vanished, error, largest), shows)

    # ---- masks -----------------------------------------------------------------------------

    def _sum(self, call: Call, first: Tensor) -> None:
        out = call.out
        if not isinstance(out, Tensor) or out.dtype not in HALF or not self._counts(call):
            self._pass_on(call, first)
            return
        terms = [t for t in call.tensors() if has_values(t) and t.device == out.device]
        finite = torch.stack([torch.isfinite(t.amin()) for t in terms]).all()
        flag = finite & torch.isneginf(out.amin())
        before = self._masks.first((first, *terms)) or _Mask(flag.long() * 0 - 1, (), out.dtype)
        # What overflowed earlier stays overflowed; the earlier line is to blame.
        here = torch.where(flag, len(before.sources), -1)
        index = torch.where(before.first >= 0, before.first, here)
        self._masks.note(out, _Mask(index, (*before.sources, call.source), out.dtype))

    def _pass_on(self, call: Call, first: Tensor) -> None:
        """A view or a copy of a mask is one, and so is what a mask is updated to."""
        known = self._masks.first(call.tensors())
        if known is not None and isinstance(call.out, Tensor):
            self._masks.note(call.out, known)

    def _through_mask(self, call: Call, scores: Tensor) -> None:
        known = self._masks.of(scores)
        if known is None or not self._counts(call, "mask"):
            return
        rows = torch.isneginf(scores).all(call.args[1]).sum()
        sources, dtype = known.sources, name_of(known.dtype)

        def shows(read: list[float]) -> None:
            first, full = map(int, read)
            if first >= 0:
                self.found(MaskOverflow, sources[first], dtype=dtype, rows=full)

        self._ask((known.first, rows), shows)

    # ---- integers --------------------------------------------------------------------------

    def _cast(self, call: Call, x: Tensor) -> None:
        out = call.out
        if self._masks:
            self._pass_on(call, x)
        made = x is out  # an arange in half precision
        if out.dtype not in HALF or x.dtype == torch.bool or self._ledger.followed([x]):
            return
        if (x.dtype in HALF and not made) or not is_plain(out) or not self._counts(call):
            return
        # What an arange counts, exactly.
        counted = {"dtype": torch.float64, "device": out.device}
        values = torch.arange(*call.args, **counted) if made else _ends(x).double()
        exact = 2 ** SIGNIFICAND_BITS[name_of(out.dtype)]
        ordered = values.sort().values
        cast = ordered.to(out.dtype).double()
        row, axes = _along(x)
        steps = row.double().diff() if row.numel() > 1 else row.double()
        asked = (
            *((values == values.floor()).all(), (steps > 0).all() | (steps < 0).all(), values.abs().max()),
            *((ordered.diff() > 0).sum() + 1, (cast.diff() > 0).sum() + 1, (cast != ordered).sum()),
        )
        place, dtype = (call.source, call.module), name_of(out.dtype)
        (into,) = self._tables.note(out, [set()])
        # A batch of features holds whole numbers by accident; positions lie along an axis.
        many, line = axes > 1, row.numel() >= LINE

        def shows(read: list[float]) -> None:
            (integral, monotone, largest), (before, after, rounded) = read[:3], map(int, read[3:])
            beyond = integral and largest > exact and rounded
            merged = after < before and monotone
            # What only divides, or is an image, may be rounded.
            if (beyond or merged) and into & (_ANGLES if integral else _TABLES):
                what = {"before": before, "after": after, "rounded": rounded, "largest": largest}
                what |= {"integral": bool(integral), "likely_data": many and not (monotone and line)}
                self.found(IntegerCollapse, *place, dtype=dtype, **what)

        self._ask(asked, shows)

    def _use(self, call: Call) -> None:
        """Note what tables go into; what is made of one by scaling or reshaping it still is one."""
        args = call.args
        if not call.kwargs and list not in map(type, args) and self._tables.keys().isdisjoint(map(id, args)):
            return  # the most frequent case by far
        made: list[set[str]] = []
        tensors = call.tensors()
        several = call.name == "sub" and len(tensors) == 2 and None not in map(self._tables.of, tensors)
        for tensor in tensors:
            # Only what is divided is still one; the divisor's rounding is one of many.
            divisor = call.name in ("div", "div_") and tensor is not args[0]
            for into in self._tables.of(tensor) or ():
                into.add("distance" if several else call.name)
                if not divisor and not any(into is one for one in made):
                    made.append(into)
        for out in tensors_in([call.out]) if made and call.name in _PASSING | _SCALED else ():
            self._tables.note(out, made)

    def _counts(self, call: Call, kind: str = "") -> bool:
        """Whether this call is among the first few of its kind (its name) on its line."""
        key = kind or call.name, call.source
        self._calls[key] += 1
        return self._calls[key] <= CALLS


#: What is done with operations on a tensor of any type; and what is done with those on half-precision ones.
_HANDLERS: dict[str, Callable[[Shadows, Call, Tensor], None]] = {
    "_to_copy": Shadows._cast,
    "_softmax": Shadows._through_mask,
    **dict.fromkeys(("add", "sub"), Shadows._sum),
    **dict.fromkeys(_PASSING, Shadows._pass_on),
}
_REPEATED: dict[str, Callable[[Shadows, Call, Tensor, Tensor], None]] = {
    **dict.fromkeys(_POINTWISE, Shadows._pointwise),
    **dict.fromkeys(_REDUCTIONS, Shadows._reduction),
    "sigmoid": Shadows._sigmoid,
    "mul": Shadows._product,
}


def _head(x: Tensor, like: Tensor | None = None) -> Tensor:
    """The first rows: as many as another has, or few enough to repeat."""
    if x.ndim == 0:
        return x
    return x[: max(1, len(x) * SAMPLE // x.numel()) if like is None or not like.ndim else len(like)]


def _along(x: Tensor) -> tuple[Tensor, int]:
    """The first values along the last axis that has several, and how many axes have."""
    axes = [axis for axis, size in enumerate(x.shape) if size > 1]
    if not axes:
        return x.reshape(-1), 0
    first = [slice(None) if axis == axes[-1] else 0 for axis in range(x.ndim)]
    return x[tuple(first)][:RUN], len(axes)


def _ends(x: Tensor) -> Tensor:
    """The first and the last :data:`RUN` elements, or all of them if they are no more, in order."""
    if x.numel() <= 2 * RUN:
        return x.reshape(-1)
    # Whole rows hold them: what lies in memory in another order is not copied for the sake of a few.
    rows = -(-RUN * x.shape[0] // x.numel())
    return torch.cat([x[:rows].reshape(-1)[:RUN], x[-rows:].reshape(-1)[-RUN:]])


def _rows(call: Call, x: Tensor, out: Tensor) -> tuple[Tensor, Tensor] | None:
    """Whole rows of a reduction's input and what belongs to them of its output, few enough to repeat."""
    place = 2 if call.name in _NORMS else 1
    dims = call.args[place] if len(call.args) > place else None
    dims = [dims] if isinstance(dims, int) else dims
    if x.ndim > 1 and out.ndim and dims and all(dim % x.ndim for dim in dims):
        keep = max(1, x.shape[0] * SAMPLE // x.numel())
        return x[:keep], out[:keep]
    return (x, out) if x.numel() <= 16 * SAMPLE or x.ndim <= 1 else None


#: Operations that make or move values without computing: what they hold comes from elsewhere, or is meant.
_INNOCENT = frozenset(
    """full fill fill_ full_like empty empty_like new_full masked_fill masked_fill_ where scalar_tensor
    zeros ones zeros_like ones_like new_zeros new_ones lift_fresh""".split()
)


class Origin(Observer):
    """Finds the first operation that makes inf or NaN.

    Args:
        recorder: Where events go.
        weights: The parameters, which may hold inf or NaN from the start.
        backward: Backward operations count too; not while a scale is at work, whose overflows are normal.
        armed: Say what is found. It may be armed as late as at the end of the step, once it is known that inf
            or NaN did harm.
    """

    def __init__(self, recorder: Recorder, weights: Iterable[Tensor], *, backward: bool, armed: bool) -> None:
        self.armed = armed
        self._recorder = recorder
        self._backward = backward
        #: Of each result: whether its inputs and itself are finite, on the device; and where it was.
        self._checked: list[tuple[list[Tensor], Tensor, NonFiniteOrigin]] = []
        self._inputs: list[Tensor] = []
        flags = [_finite(weight) for weight in weights if has_values(weight)]
        self._weights = torch.stack([flag.cpu() for flag in flags]).all() if flags else None

    def wants(self, func: Any, name: str) -> bool:
        return True

    def before(self, call: Call) -> None:
        # Now, as the operation may write to them.
        self._inputs = [_finite(tensor) for tensor in call.tensors() if has_values(tensor)]

    def after(self, call: Call) -> None:
        if call.name in _INNOCENT or (call.backward and not (self._backward or call.look.recomputes)):
            return
        what: dict[str, Any] = {"operation": call.name, "phase": "backward" if call.backward else "forward"}
        for out in filter(has_values, tensors_in([call.out])):
            event = NonFiniteOrigin(call.source, call.module, dtype=name_of(out.dtype), **what)
            self._checked.append((self._inputs, _finite(out), event))

    def end(self) -> None:
        if self.armed and self._weights is not None and not bool(self._weights):
            self._recorder.emit(NonFiniteOrigin(operation="weights"))
        elif self.armed:
            # In order, so the first is the origin; waiting operation by operation is what such a step is for.
            for inputs, out, event in self._checked:
                if not bool(out) and all(map(bool, inputs)):
                    self._recorder.emit(event)
                    break
        self._checked.clear()


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite; waits for the device."""
    return not has_values(tensor) or bool(_finite(tensor))


def _finite(tensor: Tensor) -> Tensor:
    """Whether all values are finite, without a mask in between: an aminmax lets NaN through."""
    low, high = tensor.detach().aminmax()
    return torch.isfinite(low) & torch.isfinite(high)


#: Elements looked at of each gradient, and about as many operations in a step, others in the next one.
VALUES = 1024
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
                    sample = sampled(gradient.detach(), VALUES).clone()
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
