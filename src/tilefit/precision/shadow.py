"""Shadow operations: half-precision arithmetic repeated in fp32 on samples of its own input.

Nothing waits for the device while the step runs: what was measured stays there, and is read once at its end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilefit.precision.events import IntegersMerged, MaskOverflowed, OperationChecked
from tilefit.precision.look import FORWARD, OPEN, RECOMPUTED, Call, Observer
from tilefit.precision.recorder import Recorder
from tilefit.precision.rules.base import SIGNIFICAND_BITS
from tilefit.precision.tensors import HALF, has_values, is_plain, name_of, sampled, tensors_in

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
    "pow": lambda call, x: torch.pow(x, call.args[1]),
    "square": lambda call, x: torch.square(x),
    "exp": lambda call, x: torch.exp(x),
    "log": lambda call, x: torch.log(x),
    "rsqrt": lambda call, x: torch.rsqrt(x),
    "reciprocal": lambda call, x: torch.reciprocal(x),
}
#: Operations through which a mask stays one, and a table a table.
_PASSING = frozenset(
    "view _unsafe_view expand unsqueeze slice select clone permute transpose t add_ sub_ copy_".split()
)
_REDUCTIONS = frozenset(
    "sum mean var var_mean norm linalg_vector_norm cumsum prod logsumexp _softmax _log_softmax".split()
)
#: What positions and steps go into; what else is made of whole numbers survives the rounding of some.
_ANGLES = frozenset("mm addmm bmm baddbmm mkldnn_linear linear sin cos sin_ cos_ outer ger".split())
_TABLES = frozenset("index index_select embedding gather take".split())
_SCALED = frozenset("mul div mul_ div_ cat stack _to_copy".split())


@dataclass(slots=True)
class _Pending:
    """A measurement on the device, and what becomes of it."""

    numbers: Tensor
    judge: Callable[[list[float]], None]


class _Mask(NamedTuple):
    """A sum that may be a mask.

    Attributes:
        tensor: The sum, or what it was passed on to.
        overflowed: Whether finite terms gave -inf, on the device.
        source, dtype: Of the sum.
    """

    tensor: weakref.ref[Tensor]
    overflowed: Tensor
    source: str
    dtype: torch.dtype


@dataclass(slots=True)
class _Table:
    """Values that were cast to half precision, and the operations that they have gone into."""

    into: set[str] = field(default_factory=set)


class Shadows(Observer):
    """Repeats risky operations in fp32, looks for merged integers and for masks that overflow.

    Args:
        recorder: Where events go.
        is_parameter: Whether a tensor is a parameter, whose casts are autocast's.
    """

    phases = (FORWARD, OPEN, RECOMPUTED)

    def __init__(self, recorder: Recorder, is_parameter: Callable[[Tensor], bool]) -> None:
        self._recorder = recorder
        self._is_parameter = is_parameter
        self._pending: list[_Pending] = []
        self._calls: dict[tuple[str, str], int] = {}
        self._underflowed: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._masks: dict[int, _Mask] = {}
        self._tables: dict[int, tuple[weakref.ref[Tensor], _Table]] = {}

    def wants(self, func: Any, name: str) -> bool:
        return any(name in names for names in (_POINTWISE, _REDUCTIONS, _HANDLERS, _ANGLES, _TABLES, _SCALED))

    def after(self, call: Call) -> None:
        if self._tables:
            self._use(call)
        if call.name in _PASSING and not self._masks:
            return  # no mask that could be passed on
        if call.name == "arange":
            self._cast(call, call.out)
            return
        first = call.args[0] if call.args else None
        if not isinstance(first, Tensor) or not is_plain(first) or not first.numel():
            return
        out = call.out
        if call.name in _HANDLERS:
            _HANDLERS[call.name](self, call, first)
        if call.name == "_softmax":
            self._through_mask(call, first)  # which autocast has made an fp32 one
        if first.dtype not in HALF or not isinstance(out, Tensor) or out.dtype not in HALF:
            return
        if call.name in _POINTWISE:
            self._pointwise(call, first, out)
        elif call.name in _REDUCTIONS:
            self._reduction(call, first, out)

    def end(self) -> None:
        pending, self._pending = self._pending, []
        for kept in (self._calls, self._underflowed, self._masks, self._tables):
            kept.clear()
        by_device: dict[torch.device, list[_Pending]] = {}
        for one in pending:
            by_device.setdefault(one.numbers.device, []).append(one)
        for same in by_device.values():
            read = torch.cat([one.numbers for one in same]).tolist()
            for one in same:
                size = one.numbers.numel()
                one.judge(read[:size])
                read = read[size:]

    # ---- shadow operations -----------------------------------------------------------------

    def _pointwise(self, call: Call, x: Tensor, out: Tensor) -> None:
        if out.shape != x.shape or isinstance(call.args[1] if len(call.args) > 1 else 0, Tensor):
            return
        if not self._counts(call):
            return
        if x.stride() != out.stride():
            x, out = x.contiguous(), out.contiguous()
        sample, got = sampled(x, SAMPLE), sampled(out, SAMPLE)
        self._compare(call, _POINTWISE[call.name](call, sample.float()), got.float(), out.dtype)
        if call.name == "log":
            self._after_underflow(call, x, out)

    def _reduction(self, call: Call, x: Tensor, out: Tensor) -> None:
        if not self._counts(call):
            return
        part, kept = _rows(call, x, out)
        if part is None or kept is None:
            return
        args = [part.float(), *call.args[1:]]
        kwargs = {k: v for k, v in call.kwargs.items() if k != "dtype"}
        wide = call.func(*args, **kwargs)
        self._compare(call, wide, kept.float(), out.dtype)
        if call.name == "_softmax":
            # Small probabilities may become zero, which matters where a logarithm follows.
            lost = ((kept == 0) & (wide > 0)).any()
            self._underflowed[id(out)] = weakref.ref(out), lost

    def _compare(self, call: Call, wide: Tensor, got: Tensor, dtype: torch.dtype) -> None:
        good = torch.isfinite(wide)
        overflowed = (good & ~torch.isfinite(got)).float().mean()
        vanished = ((got == 0) & (wide != 0) & good).float().mean()
        spacing = wide.abs().clamp_min(_SMALLEST[dtype]) * _EPS[dtype]
        error = torch.where(good & torch.isfinite(got), (wide - got).abs() / spacing, 0.0).max()
        largest = torch.where(good, wide.abs(), 0.0).max()
        # A value below the smallest normal number is allowed to vanish in a sum or a softmax.
        may_vanish = call.name not in _POINTWISE
        self._checked(
            call,
            call.name,
            dtype,
            torch.stack([overflowed, vanished, error, largest]),
            lambda n: (n[0], 0.0 if may_vanish else n[1], n[2], n[3]),
        )

    def _checked(
        self,
        call: Call,
        operation: str,
        dtype: torch.dtype,
        numbers: Tensor,
        figures: Callable[[list[float]], tuple[float, float, float, float]],
    ) -> None:
        source, module = call.source, call.module

        def judge(numbers: list[float]) -> None:
            overflowed, vanished, error, largest = figures(numbers)
            self._recorder.emit(
                OperationChecked(
                    source=source,
                    module=module,
                    operation=operation,
                    dtype=name_of(dtype),
                    overflowed=overflowed,
                    vanished=vanished,
                    error_ulp=error,
                    largest=largest,
                )
            )

        self._pending.append(_Pending(numbers, judge))

    def _after_underflow(self, call: Call, x: Tensor, out: Tensor) -> None:
        """A logarithm of probabilities some of which became zero in half precision."""
        known = self._underflowed.get(id(x))
        if known is not None and known[0]() is x:
            numbers = torch.stack([known[1].float(), torch.isneginf(out).float().mean()])
            self._checked(
                call, "log(softmax)", out.dtype, numbers, lambda n: (n[1] if n[0] else 0.0, 0.0, 0.0, 0.0)
            )

    # ---- masks -----------------------------------------------------------------------------

    def _sum(self, call: Call, first: Tensor) -> None:
        out = call.out
        if not isinstance(out, Tensor) or out.dtype not in HALF or not self._counts(call):
            self._pass_on(call, first)
            return
        terms = [t for t in call.tensors() if has_values(t) and t.device == out.device]
        finite = torch.stack([torch.isfinite(t.amin()) for t in terms]).all()
        flag = finite & torch.isneginf(out.amin())
        before = self._mask_of(first) or next(filter(None, map(self._mask_of, terms)), None)
        source = call.source
        if before is not None:
            # What overflowed earlier stays overflowed; the earlier line is to blame.
            flag, source = flag | before.overflowed, before.source
        self._masks[id(out)] = _Mask(weakref.ref(out), flag, source, out.dtype)

    def _pass_on(self, call: Call, first: Tensor) -> None:
        """A view or a copy of a mask is one, and so is what a mask is updated to."""
        known = next(filter(None, map(self._mask_of, call.tensors())), None)
        if known is not None and isinstance(call.out, Tensor):
            self._masks[id(call.out)] = known._replace(tensor=weakref.ref(call.out))

    def _mask_of(self, tensor: Tensor) -> _Mask | None:
        known = self._masks.get(id(tensor))
        return known if known is not None and known.tensor() is tensor else None

    def _through_mask(self, call: Call, scores: Tensor) -> None:
        known = self._mask_of(scores)
        if known is None or not self._counts(call, "mask"):
            return
        rows = torch.isneginf(scores).all(call.args[1]).sum()
        source, dtype = known.source, name_of(known.dtype)

        def judge(numbers: list[float]) -> None:
            if numbers[0]:
                self._recorder.emit(MaskOverflowed(source=source, dtype=dtype, rows=int(numbers[1])))

        self._pending.append(_Pending(torch.stack([known.overflowed.float(), rows.float()]), judge))

    # ---- integers --------------------------------------------------------------------------

    def _cast(self, call: Call, x: Tensor) -> None:
        out = call.out
        if self._masks:
            self._pass_on(call, x)
        made = x is out  # an arange in half precision
        if out.dtype not in HALF or x.dtype == torch.bool or self._is_parameter(x):
            return
        if (x.dtype in HALF and not made) or not is_plain(out) or not self._counts(call):
            return
        values = (_progression(call) if made else _ends(x)).double()
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
        source, module, dtype = call.source, call.module, name_of(out.dtype)
        table = _Table()
        self._tables[id(out)] = weakref.ref(out), table

        def judge(numbers: list[float]) -> None:
            integral, monotone, largest, before, after, rounded = numbers
            beyond = integral and largest > exact and rounded
            merged = after < before and monotone
            # What only divides, or is an image, may be rounded.
            if not (beyond or merged) or not table.into & (_ANGLES if integral else _TABLES):
                return
            in_order = bool(monotone) and row.numel() >= LINE
            self._recorder.emit(
                IntegersMerged(
                    source=source,
                    module=module,
                    dtype=dtype,
                    integral=bool(integral),
                    largest=largest,
                    before=int(before),
                    after=int(after),
                    rounded=int(rounded),
                    # A batch of features holds whole numbers by accident; positions lie along an axis.
                    likely_data=axes > 1 and not in_order,
                )
            )

        self._pending.append(_Pending(numbers.float(), judge))

    def _use(self, call: Call) -> None:
        """Note what tables go into; what is made of one by scaling or reshaping it still is one."""
        for tensor in call.tensors():
            known = self._tables.get(id(tensor))
            if known is None or known[0]() is not tensor:
                continue
            known[1].into.add(call.name)
            if call.name in _PASSING or call.name in _SCALED:
                for out in tensors_in([call.out]):
                    # Only what is divided is still one; the divisor's rounding is one of many.
                    if call.name not in ("div", "div_") or tensor is call.args[0]:
                        self._tables[id(out)] = weakref.ref(out), known[1]

    def _counts(self, call: Call, kind: str = "") -> bool:
        """Whether this call is among the first few of its kind (its name) on its line."""
        key = kind or call.name, call.source
        self._calls[key] = self._calls.get(key, 0) + 1
        return self._calls[key] <= CALLS


def judge_buffers(recorder: Recorder, model: nn.Module) -> None:
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
        if bool((values == values.floor()).all()) and bool((steps >= 0).all()) and bool((steps == 0).any()):
            event = IntegersMerged(
                module=name,
                dtype=name_of(buffer.dtype),
                integral=True,
                largest=float(values.abs().max()),
                before=values.numel(),
                after=int((steps > 0).sum()) + 1,
            )
            recorder.emit_once(("buffer", id(buffer)), lambda event=event: event)  # type: ignore[misc]


_HANDLERS: dict[str, Callable[[Shadows, Call, Tensor], None]] = {
    "_to_copy": Shadows._cast,
    "arange": Shadows._cast,
    **dict.fromkeys(("add", "sub"), Shadows._sum),
    **dict.fromkeys(_PASSING, Shadows._pass_on),
}


def _progression(call: Call) -> Tensor:
    """What an arange counts, exactly."""
    return torch.arange(*call.args, dtype=torch.float64, device=call.out.device)


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
    if call.name in ("linalg_vector_norm", "norm"):
        dims = call.args[2] if len(call.args) > 2 else None
    if isinstance(dims, int):
        dims = [dims]
    if not isinstance(dims, list | tuple) or not all(isinstance(dim, int) for dim in dims):
        return (x, out) if x.numel() <= SAMPLE else (None, None)
    if any(dim % x.ndim == 0 for dim in dims):
        return (x, out) if x.numel() <= 16 * SAMPLE else (None, None)
    keep = max(1, x.shape[0] * SAMPLE // x.numel())
    return x[:keep], out[:keep]
