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
    "sqrt": torch.sqrt,
    "reciprocal": torch.reciprocal,
}
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
_FIGURES = ("operation", "dtype", "overflowed", "vanished", "error_ulp", "largest")
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
        #: Measurements on the device, and what each shows.
        self._pending: list[tuple[Tensor, Callable[[list[float]], PrecisionRule | None]]] = []
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
        by_device = defaultdict(list)
        for numbers, shows in self._pending:
            by_device[numbers.device].append((numbers, shows))
        for kept in (self._pending, self._calls, self._wide, self._masks, self._tables):
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
        known = self._wide.of(x) if call.name in _ROOTS or call.name == "log" else None
        if known is not None:
            exact, got = _POINTWISE[call.name](known[0]), _head(out, known[0]).float()
            what = f"{call.name} of rounded values"
            self._compare(call, exact, got, out.dtype, what, chain=True, source=known[1])
            return
        if x.stride() != out.stride():
            x, out = x.contiguous(), out.contiguous()
        sample, got = sampled(x, SAMPLE), sampled(out, SAMPLE)
        wide = _POINTWISE[call.name](sample.float(), *call.args[1:])
        self._compare(call, wide, got.float(), out.dtype)

    def _sigmoid(self, call: Call, x: Tensor, out: Tensor) -> None:
        if self._counts(call):
            self._wide.note(out, (torch.sigmoid(_head(x).float()), ""))

    def _product(self, call: Call, x: Tensor, out: Tensor) -> None:
        """A product of two tensors, a square say, may overflow."""
        other = call.args[1]
        same = isinstance(other, Tensor) and other.shape == x.shape == out.shape and other.dtype in HALF
        if same and x.stride() == other.stride() == out.stride() and self._counts(call):
            factors = [sampled(factor, SAMPLE).float() for factor in (x, other)]
            self._compare(call, factors[0] * factors[1], sampled(out, SAMPLE).float(), out.dtype, chain=True)

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
        if not self._counts(call):
            return
        part, kept = _rows(call, x, out)
        if part is None or kept is None:
            return
        kwargs = {k: v for k, v in call.kwargs.items() if k != "dtype"}
        wide = call.func(part.float(), *call.args[1:], **kwargs)
        self._compare(call, wide, kept.float(), out.dtype)
        if isinstance(wide, Tensor):
            self._wide.note(out, (wide, ""))

    def _norms(self, call: Call) -> None:
        """The norms of many tensors, as clipping takes them of gradients."""
        tensors, order = call.args[0], call.args[1] if len(call.args) > 1 else 2
        pairs = [pair for pair in zip(tensors, call.out, strict=True) if pair[0].dtype in HALF]
        pairs = [(x, out) for x, out in pairs if is_plain(x) and x.numel() and out.dtype == pairs[0][1].dtype]
        if pairs and pairs[0][1].dtype in HALF and self._counts(call):
            wide = [torch.linalg.vector_norm(x, order, dtype=torch.float32) for x, _ in pairs]
            got = torch.stack([out for _, out in pairs])
            self._compare(call, torch.stack(wide), got.float(), got.dtype)

    def _compare(
        self,
        call: Call,
        wide: Tensor,
        got: Tensor,
        dtype: torch.dtype,
        operation: str = "",
        *,
        chain: bool = False,
        source: str = "",
    ) -> None:
        good = torch.isfinite(wide)
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
        place, what = (source or call.source, call.module), (operation or call.name, name_of(dtype))
        rule = NormOverflow if call.name in _NORMS else ReductionInHalf

        def shows(read: list[float]) -> PrecisionRule:
            figures: dict[str, Any] = dict(zip(_FIGURES, (*what, *read), strict=True))
            return rule(*place, **figures)

        self._pending.append((torch.stack([overflowed, vanished, error, largest]), shows))

    # ---- masks -----------------------------------------------------------------------------

    def _sum(self, call: Call, first: Tensor) -> None:
        out = call.out
        if not isinstance(out, Tensor) or out.dtype not in HALF or not self._counts(call):
            self._pass_on(call, first)
            return
        terms = [t for t in call.tensors() if has_values(t) and t.device == out.device]
        finite = torch.stack([torch.isfinite(t.amin()) for t in terms]).all()
        flag = finite & torch.isneginf(out.amin())
        sources: tuple[str, ...] = (call.source,)
        index = flag.long() - 1
        before = self._masks.first((first, *terms))
        if before is not None:
            # What overflowed earlier stays overflowed; the earlier line is to blame.
            index = torch.where(before.first >= 0, before.first, torch.where(flag, len(before.sources), -1))
            sources = before.sources + sources
        self._masks.note(out, _Mask(index, sources, out.dtype))

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

        def shows(read: list[float]) -> PrecisionRule | None:
            first, full = map(int, read)
            return MaskOverflow(sources[first], dtype=dtype, rows=full) if first >= 0 else None

        self._pending.append((torch.stack([known.first.float(), rows.float()]), shows))

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
