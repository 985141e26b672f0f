"""Shadow operations: half-precision arithmetic repeated in fp32 on samples of its own input.

Nothing waits for the device while the step runs: what was measured stays there, and is read once at its end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilefit.precision.ledger import Tracker
from tilefit.precision.look import FORWARD, OPEN, RECOMPUTED, Call, Observer
from tilefit.precision.rules import PrecisionRule
from tilefit.precision.rules.base import SIGNIFICAND_BITS
from tilefit.precision.rules.numerics import IntegerCollapse, MaskOverflow, NormOverflow, ReductionInHalf
from tilefit.precision.tensors import HALF, Notes, has_values, is_plain, name_of, sampled, tensors_in

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

_POINTWISE: dict[str, Callable[..., Tensor]] = {
    "pow": torch.pow,
    "square": torch.square,
    "exp": torch.exp,
    "log": torch.log,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
}
#: Operations through which a mask stays one, and a table a table.
_PASSING = frozenset(
    "view _unsafe_view expand unsqueeze slice select clone permute transpose t add_ sub_ copy_".split()
)
_NORMS = ("linalg_vector_norm", "norm", "_foreach_norm")
#: What an operation that was repeated is judged by.
_FIGURES = ("operation", "dtype", "overflowed", "vanished", "error_ulp", "largest")
_REDUCTIONS = frozenset(
    "sum mean var var_mean norm linalg_vector_norm cumsum prod logsumexp _softmax _log_softmax".split()
)
#: What positions and steps go into; what else is made of whole numbers survives the rounding of some.
_ANGLES = frozenset("mm addmm bmm baddbmm mkldnn_linear linear sin cos sin_ cos_ outer ger".split())
_TABLES = frozenset("index index_select embedding gather take".split())
_SCALED = frozenset("mul div mul_ div_ cat stack _to_copy".split())


class _Mask(NamedTuple):
    """A sum that may be a mask.

    Attributes:
        overflowed: Whether finite terms gave -inf, on the device.
        source, dtype: Of the sum.
    """

    overflowed: Tensor
    source: str
    dtype: torch.dtype


class Shadows(Tracker, Observer):
    """Repeats risky operations in fp32, looks for merged integers and for masks that overflow."""

    phases = (FORWARD, OPEN, RECOMPUTED)

    def set_up(self) -> None:
        #: Measurements on the device, and what each shows.
        self._pending: list[tuple[Tensor, Callable[[list[float]], PrecisionRule | None]]] = []
        self._calls: Counter[tuple[str, str]] = Counter()
        self._underflowed: Notes[Tensor] = Notes()
        self._masks: Notes[_Mask] = Notes()
        #: What is made of values that were cast to half precision, and what each of these has gone into.
        self._tables: Notes[list[set[str]]] = Notes()

    def wants(self, func: Any, name: str) -> bool:
        tables = (_POINTWISE, _REDUCTIONS, _NORMS, _HANDLERS, _ANGLES, _TABLES, _SCALED)
        return any(name in names for names in tables)

    def after(self, call: Call) -> None:
        if self._tables:
            self._use(call)
        if call.name in _PASSING and not self._masks:
            return  # no mask that could be passed on
        if call.name == "arange":
            self._cast(call, call.out)
            return
        if call.name == "_foreach_norm":
            self._norms(call)
            return
        first, out, handler = call.args[0] if call.args else None, call.out, _HANDLERS.get(call.name)
        masks = call.name == "_softmax"
        if not isinstance(first, Tensor) or not (handler or masks or first.dtype in HALF):
            return
        if not is_plain(first) or not first.numel():
            return
        if handler:
            handler(self, call, first)
        if masks:
            self._through_mask(call, first)  # which autocast has made an fp32 one
        if first.dtype not in HALF or not isinstance(out, Tensor) or out.dtype not in HALF:
            return
        if call.name in _POINTWISE:
            self._pointwise(call, first, out)
        elif call.name in _REDUCTIONS:
            self._reduction(call, first, out)

    def end(self) -> None:
        by_device = defaultdict(list)
        for numbers, shows in self._pending:
            by_device[numbers.device].append((numbers, shows))
        for kept in (self._pending, self._calls, self._underflowed, self._masks, self._tables):
            kept.clear()
        for same in by_device.values():
            read = torch.cat([numbers for numbers, _ in same]).tolist()
            for numbers, shows in same:
                event = shows(read[: numbers.numel()])
                read = read[numbers.numel() :]
                if event is not None:
                    self._recorder.emit(event)

    def met(self, model: nn.Module) -> None:
        """Look for tables of whole numbers among a model's half-precision buffers that have merged already.

        ``model.bfloat16()`` casts buffers too. Waits for the device.
        """
        for name, buffer in model.named_buffers():
            if buffer.dtype not in HALF or not is_plain(buffer):
                continue
            exact = 2 ** SIGNIFICAND_BITS[name_of(buffer.dtype)]
            values = buffer.detach().reshape(-1)[:SAMPLE].float()
            if values.numel() <= exact or values.abs().max() <= exact:
                continue
            steps = values.diff()
            if bool((values == values.floor()).all() & (steps >= 0).all() & (steps == 0).any()):
                largest, left = float(values.abs().max()), int((steps > 0).sum()) + 1
                what: dict[str, Any] = {"dtype": name_of(buffer.dtype), "integral": True, "largest": largest}
                self._recorder.emit(IntegerCollapse("", name, before=values.numel(), after=left, **what))

    # ---- shadow operations -----------------------------------------------------------------

    def _pointwise(self, call: Call, x: Tensor, out: Tensor) -> None:
        if out.shape != x.shape or isinstance(call.args[1] if len(call.args) > 1 else 0, Tensor):
            return
        if not self._counts(call):
            return
        if x.stride() != out.stride():
            x, out = x.contiguous(), out.contiguous()
        sample, got = sampled(x, SAMPLE), sampled(out, SAMPLE)
        wide = _POINTWISE[call.name](sample.float(), *call.args[1:])
        self._compare(call, wide, got.float(), out.dtype)
        if call.name == "log":
            self._after_underflow(call, x, out)

    def _reduction(self, call: Call, x: Tensor, out: Tensor) -> None:
        if not self._counts(call):
            return
        part, kept = _rows(call, x, out)
        if part is None or kept is None:
            return
        kwargs = {k: v for k, v in call.kwargs.items() if k != "dtype"}
        wide = call.func(part.float(), *call.args[1:], **kwargs)
        self._compare(call, wide, kept.float(), out.dtype)
        if call.name == "_softmax":
            # Small probabilities may become zero, which matters where a logarithm follows.
            self._underflowed.note(out, ((kept == 0) & (wide > 0)).any())

    def _norms(self, call: Call) -> None:
        """The norms of many tensors, as clipping takes them of gradients."""
        tensors, order = call.args[0], call.args[1] if len(call.args) > 1 else 2
        pairs = [pair for pair in zip(tensors, call.out, strict=True) if pair[0].dtype in HALF]
        pairs = [(x, out) for x, out in pairs if is_plain(x) and x.numel() and out.dtype == pairs[0][1].dtype]
        if pairs and pairs[0][1].dtype in HALF and self._counts(call):
            wide = [torch.linalg.vector_norm(x, order, dtype=torch.float32) for x, _ in pairs]
            got = torch.stack([out for _, out in pairs])
            self._compare(call, torch.stack(wide), got.float(), got.dtype)

    def _compare(self, call: Call, wide: Tensor, got: Tensor, dtype: torch.dtype) -> None:
        good = torch.isfinite(wide)
        overflowed = (good & ~torch.isfinite(got)).float().mean()
        vanished = ((got == 0) & (wide != 0) & good).float().mean()
        spacing = wide.abs().clamp_min(_SMALLEST[dtype]) * _EPS[dtype]
        error = torch.where(good & torch.isfinite(got), (wide - got).abs() / spacing, 0.0).max()
        largest = torch.where(good, wide.abs(), 0.0).max()
        if call.name not in _POINTWISE:
            # A value below the smallest normal number is allowed to vanish in a sum or a softmax.
            vanished = torch.zeros_like(vanished)
        self._checked(call, call.name, dtype, overflowed, vanished, error, largest)

    def _checked(self, call: Call, operation: str, dtype: torch.dtype, *numbers: Tensor) -> None:
        place, what = (call.source, call.module), (operation, name_of(dtype))
        rule = NormOverflow if operation in _NORMS else ReductionInHalf

        def shows(read: list[float]) -> PrecisionRule:
            figures: dict[str, Any] = dict(zip(_FIGURES, (*what, *read), strict=True))
            return rule(*place, **figures)

        self._pending.append((torch.stack(numbers), shows))

    def _after_underflow(self, call: Call, x: Tensor, out: Tensor) -> None:
        """A logarithm of probabilities some of which became zero in half precision."""
        lost = self._underflowed.of(x)
        if lost is not None:
            zero = torch.zeros((), device=x.device)
            infinite = torch.isneginf(out).float().mean() * lost
            self._checked(call, "log(softmax)", out.dtype, infinite, zero, zero, zero)

    # ---- masks -----------------------------------------------------------------------------

    def _sum(self, call: Call, first: Tensor) -> None:
        out = call.out
        if not isinstance(out, Tensor) or out.dtype not in HALF or not self._counts(call):
            self._pass_on(call, first)
            return
        terms = [t for t in call.tensors() if has_values(t) and t.device == out.device]
        finite = torch.stack([torch.isfinite(t.amin()) for t in terms]).all()
        flag = finite & torch.isneginf(out.amin())
        before, source = self._masks.first((first, *terms)), call.source
        if before is not None:
            # What overflowed earlier stays overflowed; the earlier line is to blame.
            flag, source = flag | before.overflowed, before.source
        self._masks.note(out, _Mask(flag, source, out.dtype))

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
        source, dtype = known.source, name_of(known.dtype)

        def shows(read: list[float]) -> PrecisionRule | None:
            return MaskOverflow(source, dtype=dtype, rows=int(read[1])) if read[0] else None

        self._pending.append((torch.stack([known.overflowed.float(), rows.float()]), shows))

    # ---- integers --------------------------------------------------------------------------

    def _cast(self, call: Call, x: Tensor) -> None:
        out = call.out
        if self._masks:
            self._pass_on(call, x)
        made = x is out  # an arange in half precision
        if out.dtype not in HALF or x.dtype == torch.bool or self._ledger.is_parameter(x):
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
        numbers = torch.stack(
            [
                (values == values.floor()).all().double(),
                (steps > 0).all().double() + (steps < 0).all().double(),
                values.abs().max(),
                (ordered.diff() > 0).sum().double() + 1,
                (cast.diff() > 0).sum().double() + 1,
                (cast != ordered).sum().double(),
            ]
        )
        place, dtype = (call.source, call.module), name_of(out.dtype)
        (into,) = self._tables.note(out, [set()])
        # A batch of features holds whole numbers by accident; positions lie along an axis.
        many, line = axes > 1, row.numel() >= LINE

        def shows(read: list[float]) -> PrecisionRule | None:
            (integral, monotone, largest), counts = read[:3], map(int, read[3:])
            before, after, rounded = counts
            beyond = integral and largest > exact and rounded
            merged = after < before and monotone
            # What only divides, or is an image, may be rounded.
            if not (beyond or merged) or not into & (_ANGLES if integral else _TABLES):
                return None
            return IntegerCollapse(
                *place,
                dtype=dtype,
                integral=bool(integral),
                largest=largest,
                before=before,
                after=after,
                rounded=rounded,
                likely_data=many and not (monotone and line),
            )

        self._pending.append((numbers.float(), shows))

    def _use(self, call: Call) -> None:
        """Note what tables go into; what is made of one by scaling or reshaping it still is one."""
        args = call.args
        if not call.kwargs and list not in map(type, args) and self._tables.keys().isdisjoint(map(id, args)):
            return  # the most frequent case by far
        made: list[set[str]] = []
        for tensor in call.tensors():
            # Only what is divided is still one; the divisor's rounding is one of many.
            divisor = call.name in ("div", "div_") and tensor is not args[0]
            for into in self._tables.of(tensor) or ():
                into.add(call.name)
                if not divisor and not any(into is one for one in made):
                    made.append(into)
        for out in tensors_in([call.out]) if made and call.name in _PASSING | _SCALED else ():
            self._tables.note(out, made)

    def _counts(self, call: Call, kind: str = "") -> bool:
        """Whether this call is among the first few of its kind (its name) on its line."""
        key = kind or call.name, call.source
        self._calls[key] += 1
        return self._calls[key] <= CALLS


_HANDLERS: dict[str, Callable[[Shadows, Call, Tensor], None]] = {
    "_to_copy": Shadows._cast,
    "arange": Shadows._cast,
    **dict.fromkeys(("add", "sub"), Shadows._sum),
    **dict.fromkeys(_PASSING, Shadows._pass_on),
}


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


def _rows(call: Call, x: Tensor, out: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Whole rows of a reduction's input and what belongs to them of its output, few enough to repeat."""
    if out.ndim == 0 or x.ndim == 0 or x.ndim == 1:
        return x, out
    dims = call.args[1] if len(call.args) > 1 else None
    if call.name in _NORMS:
        dims = call.args[2] if len(call.args) > 2 else None
    if isinstance(dims, int):
        dims = [dims]
    if not isinstance(dims, list | tuple) or not all(isinstance(dim, int) for dim in dims):
        return (x, out) if x.numel() <= SAMPLE else (None, None)
    if any(dim % x.ndim == 0 for dim in dims):
        return (x, out) if x.numel() <= 16 * SAMPLE else (None, None)
    keep = max(1, x.shape[0] * SAMPLE // x.numel())
    return x[:keep], out[:keep]
