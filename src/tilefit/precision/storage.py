"""What is kept and summed in half precision: whether values move as they should, parameters under their
optimizer and averages under updates; and the losses and sums of gradients that feed a step.

The measure of movement is the projection of the actual one on the intended one, sum(actual * intended) /
sum(intended²): 1 where all is well, also with stochastic rounding, and 0 where every update is rounded away.
Counting values that did not change would accuse stochastic rounding.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tilefit.emulation.tensor import CudaTensor
from tilefit.precision.degrees import base_name
from tilefit.precision.graph import Kind
from tilefit.precision.ledger import Begins, Pass, Stepped, Stepping, Tracker, is_pytorchs, twin_of
from tilefit.precision.lines import user_line
from tilefit.precision.look import FORWARD, OPEN, Call, Observer
from tilefit.precision.recorder import Recorder
from tilefit.precision.rules.autocast import LossInHalfPrecision
from tilefit.precision.rules.storage import (
    ENOUGH,
    AccumulationNotAveraged,
    HalfAccumulator,
    LowPrecisionGradientSum,
    Movement,
    OptimizerStateInHalf,
    UpdateBelowUlp,
)
from tilefit.precision.tensors import (
    HALF,
    Notes,
    has_values,
    is_dense,
    is_plain,
    name_of,
    parameters_of,
    spread,
    tensors_in,
)

#: Steps an optimizer is followed for, and fewer that tell nothing; before ENOUGH what they tell is a note.
STEPS, FEWEST = 32, 3
#: Parameters followed per group.
PARAMETERS = 64
#: Operations, element by element, by which tensors are updated; others that updates are made with, and those
#: that only move values.
_UPDATES = frozenset("add sub rsub lerp addcmul addcdiv".split())
_PRODUCTS = frozenset("mul div neg".split())
_MOVES = frozenset("copy clone _to_copy".split())
#: How an optimizer's step is made again: as its formula says, on whatever device.
_PLAINLY = {"foreach": False, "fused": False, "capturable": False}
#: Where the values of a tensor are.
_Place = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class _Followed:
    """An optimizer whose first steps are made again in fp32, as a class of PyTorch's makes them.

    Attributes:
        base: The class.
        steps: Steps made.
        moved: How far parameters have moved, by group and element type.
        expected: Where the running step should take them.
    """

    base: type[Optimizer]
    steps: int = 0
    moved: dict[Any, _Moved] = field(default_factory=dict)
    expected: list[_Expected] = field(default_factory=list)


class Weights(Tracker):
    """Makes the first steps of optimizers of PyTorch's again in fp32 on samples of half-precision parameters,
    and looks at the element types of each optimizer's state, and at its constants in them."""

    def set_up(self) -> None:
        self._of: weakref.WeakKeyDictionary[Optimizer, _Followed | None] = weakref.WeakKeyDictionary()
        #: The same: optimizers may be gone at the end.
        self._followed: list[_Followed] = []

    def on_stepping(self, stepping: Stepping) -> None:
        """An optimizer is about to step: see where it should go."""
        optimizer = stepping.optimizer
        if optimizer not in self._of:
            self._of[optimizer] = self._begin(optimizer)
        followed = self._of[optimizer]
        if followed is not None and followed.steps < STEPS:
            with torch._C._DisableTorchDispatch():  # no mode is to see this, nor one of the user's
                followed.expected = list(_expected(optimizer, followed.base))

    def _begin(self, optimizer: Optimizer) -> _Followed | None:
        half = [parameter for parameter in parameters_of(optimizer) if parameter.dtype in HALF]
        if not half or any(isinstance(parameter, CudaTensor) for parameter in half):
            return None
        base, name = twin_of(type(optimizer)), type(optimizer).__name__  # type: ignore[arg-type]
        if base is None or not all(map(is_plain, half)):
            what = f"half-precision weights under {name}, whose intended step is not known"
            self._recorder.cannot_check(what, "AMP013")
            return None
        self._followed.append(_Followed(base))
        return self._followed[-1]

    def on_stepped(self, stepped: Stepped) -> None:
        """It has gone there, or not."""
        optimizer, name = stepped.optimizer, type(stepped.optimizer).__name__
        # Others may keep their constants elsewhere, or quantise on purpose.
        if self._recorder.looking and not stepped.skipped and is_pytorchs(optimizer):
            for what in _half_states(optimizer):
                self.found(OptimizerStateInHalf, None, name, **what)
        followed = self._of.get(optimizer)
        if followed is None or not followed.expected:
            return
        expected, followed.expected = followed.expected, []
        for key, parameters, before, wanted in () if stepped.skipped else expected:
            known = followed.moved.setdefault(key, _Moved(module=name, dtype=name_of(key[1])))
            known.source = user_line()
            with torch._C._DisableTorchDispatch():
                known.add(known.steps, before, _sampled(parameters), wanted)
        followed.steps += not stepped.skipped
        if followed.steps == STEPS:
            self._judge(followed)

    def finish(self) -> None:
        """Judge what was followed. Waits for the device."""
        for followed in self._followed:
            if followed.steps < ENOUGH:
                what = f"whether updates are lost over {ENOUGH} steps: fewer were made"
                self._recorder.cannot_check(what, "AMP013")
            if followed.steps < STEPS:
                self._judge(followed)

    def _judge(self, followed: _Followed) -> None:
        for known in followed.moved.values():
            if known.steps >= FEWEST:
                known.judge(self._recorder, UpdateBelowUlp)


@dataclass(slots=True, eq=False)
class _Moved:
    """How far some values have moved: the actual and the intended movement times the intended one."""

    source: str = ""
    module: str = ""
    dtype: str = ""
    first: int = -1
    steps: int = 0
    number: int = 0
    products: Tensor | None = None

    def add(self, step: int, before: Tensor, after: Tensor, wanted: Tensor) -> None:
        """In a step values have gone somewhere, and should have gone where they were wanted."""
        intended = wanted - before
        products = (torch.stack([after - before, intended]) * intended).sum(1)
        self.products = products if self.products is None else self.products + products
        self.number += before.numel()
        self.first = step if self.first < 0 else self.first
        self.steps = step - self.first + 1

    def judge(self, recorder: Recorder, rule: type[Movement], **more: Any) -> None:
        """Say how far of what was intended. Waits for the device."""
        product, square = (0.0, 0.0) if self.products is None else self.products.tolist()
        if square > 0:
            of: dict[str, Any] = {"dtype": self.dtype, "steps": self.steps, "number": self.number}
            recorder.emit(rule(self.source, self.module, projection=product / square, **of, **more))


#: Parameters of one group and element type: where a sample of them is, and where a step should take it.
_Expected = tuple[tuple[int, torch.dtype, torch.device, bool], list[Tensor], Tensor, Tensor]


def _expected(optimizer: Optimizer, base: type[Optimizer]) -> Iterator[_Expected]:
    """The step that an optimizer is about to make, in fp32: as its class makes it, below its hooks."""
    step: Callable[[Optimizer], object] = getattr(base.step, "__wrapped__", base.step)
    for number, group in enumerate(optimizer.param_groups):
        alike: defaultdict[Any, list[Tensor]] = defaultdict(list)
        for p in sorted(group["params"], key=lambda p: -p.numel()):
            if p.dtype in HALF and p.numel() and p.grad is not None and is_plain(p.grad):
                alike[number, p.dtype, p.device, bool(optimizer.state.get(p))].append(p)
        kept = {k: v for k, v in group.items() if k not in ("params", "initial_lr", "param_names")}
        for key, parameters in alike.items():
            del parameters[PARAMETERS:]
            before = _sampled(parameters)
            wide = before.clone().requires_grad_()
            wide.grad = _sampled([p.grad for p in parameters if p.grad is not None])
            twin = base([{**kept, **_PLAINLY, "params": [wide]}], lr=1e-3)  # type: ignore[call-arg]
            states = [optimizer.state.get(p, {}) for p in parameters]
            for name, value in states[0].items():
                if isinstance(value, Tensor) and value.shape == parameters[0].shape:
                    twin.state[wide][name] = _sampled([state[name] for state in states])
                else:
                    # Step counts of fused optimizers are on the device, the twin's are not.
                    twin.state[wide][name] = value.cpu().clone() if isinstance(value, Tensor) else value
            step(twin)
            yield key, parameters, before, wide.detach()


def _sampled(tensors: list[Tensor]) -> Tensor:
    """Up to about :data:`VALUES` elements of each tensor, in fp32, one after the other."""
    return torch.cat(list(map(spread, tensors))).float()


def _half_states(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """The constants of each group of an optimizer of PyTorch's in the element types of its state."""
    for group in optimizer.param_groups:
        half = next((p for p in group["params"] if p.dtype in HALF and p.grad is not None), None)
        if half is None:
            continue
        state = optimizer.state.get(half, {}).values()
        kept = [v.dtype for v in state if isinstance(v, Tensor) and v.shape == half.shape]
        dtype = next((d for d in kept if d in HALF), None)
        lr, decay, betas = group.get("lr"), group.get("weight_decay"), group.get("betas") or (None, None)
        decoupled = group.get("decoupled_weight_decay") or "AdamW" in type(optimizer).__name__
        shrink = 1 - float(lr) * float(decay) if decoupled and decay and lr is not None else None
        given = {"eps": (group.get("eps"), dtype), "beta2": (betas[1], dtype), "decay": (shrink, half.dtype)}
        known = ((key, value, where) for key, (value, where) in given.items() if value is not None and where)
        constants = {key: _rounded(float(value), where) for key, value, where in known}
        yield {"dtype": name_of(dtype or half.dtype), "constants": constants}


def _rounded(value: float, dtype: torch.dtype) -> tuple[float, float]:
    return value, torch.tensor(value, dtype=torch.float64).to(dtype).item()


class _Made(NamedTuple):
    """What an operation makes of half-precision tensors.

    Attributes:
        values: Its sampled elements, as fp32 arithmetic makes them.
        bases: What it is made of: where that lies, and its elements. Nothing else may come to lie there.
        added: It is a sum: products alone may keep a tensor where it is.
    """

    values: Tensor
    bases: dict[_Place, tuple[Tensor, StorageWeakRef]]
    added: bool


@dataclass(slots=True, eq=False)
class _Sum(_Moved):
    """What is known of one tensor that is updated again and again, or of the weights that a line updates.

    Attributes:
        storages: Where it lies.
        weights: It is weights.
        added: It was not only multiplied.
        compensated: How far it moved is read, so that what was rounded away is not lost.
    """

    storages: dict[_Place, StorageWeakRef] = field(default_factory=dict)
    weights: bool = False
    added: bool = False
    compensated: bool = False

    @property
    def lost(self) -> bool:
        """What is rounded away of its movement is lost, as far as is known."""
        return self.added and not self.compensated

    def updated(self, step: int, source: str, old: Tensor, new: Tensor, made: _Made) -> None:
        """Something was to be made of old values, and these are the new ones."""
        self.source, self.dtype, self.added = source, name_of(new.dtype), self.added or made.added
        self.add(step, old, spread(new).float(), made.values)


class Accumulators(Tracker, Observer):
    """Follows half-precision tensors that PyTorch's arithmetic, which rounds to nearest, updates step after
    step, in place or by a new tensor made of the old one: averages, sums, and where no optimizer of PyTorch's
    is at work, its state and weights. They are known by where they lie: any alias may be used. Each update is
    repeated in fp32 on samples."""

    phases = (FORWARD, OPEN)

    def set_up(self) -> None:
        self._sums: dict[_Place, _Sum] = {}
        #: Those of weights, by line, optimizer and element type.
        self._weights: dict[tuple[Any, ...], _Sum] = {}
        #: What the running operation writes to, what was there, and what should be.
        self._written: list[tuple[Tensor, Tensor, _Made]] = []
        self._made: Notes[_Made] = Notes()
        #: Tensors made out of old ones in this step, which have moved if they are kept: what says so.
        self._made_now: dict[_Place, tuple[StorageWeakRef, Callable[[], None]]] = {}

    def wants(self, func: Any, name: str) -> bool:
        return base_name(name) in _UPDATES | _PRODUCTS | _MOVES

    def before(self, call: Call) -> None:
        self._written = []
        written, name = call.targets, base_name(call.name)
        if written and name == "mul":
            self._shrinks(call, written)
        if not all(t.dtype in HALF and has_values(t) and t.is_leaf for t in written):
            return  # what a graph has made is an activation of this step
        if written and {id(g.value) for g in self._ledger.gradients}.isdisjoint(map(id, written)):
            pairs = zip(written, self._wide(call, written), strict=False)
            self._written = [
                (t, spread(t).float(), m) for t, m in pairs if name != "copy" or _place(t) in m.bases
            ]

    def after(self, call: Call) -> None:
        step, name, operands = self._recorder.step, base_name(call.name), call.tensors()
        for target, old, made in self._written:
            self._known(call, target).updated(step, call.source, old, target, made)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands):
            return
        if not any(tensor.dtype in HALF or id(tensor) in self._made for tensor in operands):
            return
        if name == "sub" and len(operands) == 2 and self._looks_back(*operands):
            for out in tensors_in([call.out]):
                self._made.pop(id(out), None)  # of how it was rounded fp32 says nothing
            return
        if name in ("copy", "clone") and (place := _place(operands[-1])) in self._sums:
            held = self._sums.get(_place(call.out))
            if held is None or not held.weights:
                self._keep(self._sums[place], call.out)
                self._moves(place)
            else:
                self._made_now.pop(place, None)  # weights have moved above
        outs, in_place = tensors_in([call.out]), call.name.endswith("_")
        if not all(map(has_values, outs)) or (in_place and not any(map(self._made.of, outs))):
            return
        mades = [made for _, _, made in self._written] if in_place else self._wide(call, outs)
        for out, made in zip(outs, mades, strict=False):
            self._made.note(out, made)
            if name in _UPDATES and out.dtype in HALF:
                self._succeeds(call, out, made)

    def _wide(self, call: Call, like: list[Tensor]) -> list[_Made]:
        """What an operation makes of the sampled elements in fp32, for each of its results; nothing where
        operands do not fit them element by element."""
        bases: list[dict[_Place, tuple[Tensor, StorageWeakRef]]] = [{} for _ in like]
        name = base_name(call.name)
        added = [name in _UPDATES]

        # It must not call itself, and hold what it saw until the garbage is collected.
        def wide(value: Any, index: int = 0) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            if value.shape != like[index].shape:
                if value.numel() != 1:
                    raise ValueError("it does not fit")
                added[0] = False
                return value.detach().float()
            made, values = self._made.of(value), spread(value).float()
            if made is None:
                bases[index].setdefault(_place(value), (values.clone(), _reference(value)))
                return values
            bases[index] |= made.bases
            added.append(made.added)
            return made.values.clone()

        try:
            args = [
                [wide(one, n) for n, one in enumerate(arg)] if isinstance(arg, list | tuple) else wide(arg)
                for arg in call.args[name == "copy" :]
            ]
            kwargs = {key: wide(value) for key, value in call.kwargs.items()}
        except (ValueError, IndexError):
            return []
        results = args[0] if name in _MOVES else call.func(*args, **kwargs)
        results = args[0] if results is None else results  # lists that were written to
        results = results if isinstance(results, list | tuple) else [results]
        return [_Made(values, those, any(added)) for values, those in zip(results, bases, strict=True)]

    def _known(self, call: Call, target: Tensor) -> _Sum:
        """What is known of what an operation writes to."""
        place, stepping = _place(target), self._ledger.here.stepping
        alike = (p for p in self._ledger.parameters if p.dtype is target.dtype and is_plain(p))
        if not any((p.data_ptr(), p.numel()) == (target.data_ptr(), target.numel()) for p in alike):
            return self._keep(self._sums.get(place) or _Sum(), target)
        name = type(stepping[0]).__name__ if stepping else ""
        known = self._weights.setdefault((call.source, name, target.dtype), _Sum(module=name, weights=True))
        return self._keep(known, target)

    def _looks_back(self, minuend: Tensor, subtrahend: Tensor) -> bool:
        """What was made of a sum, less the sum, tells what was rounded away; so does a sum, less its past."""
        made, copied, place = self._made.of(minuend), self._made.of(subtrahend), _place(subtrahend)
        if copied is not None and len(copied.bases) == 1 and place not in self._sums:
            ((base, (values, _)),) = copied.bases.items()
            place = base if base in self._sums and torch.equal(values, copied.values) else place
        past = {_place(minuend), *(made.bases if made is not None else ())}
        looks = place in self._sums and place in past
        if looks:
            self._sums[place].compensated = True
        return looks

    def _succeeds(self, call: Call, out: Tensor, made: _Made) -> None:
        """A new tensor may be an old one's successor, and this the first of them."""
        base = next((place for place in made.bases if place in self._sums), None)
        known = _Sum() if base is None else self._sums[base]
        if base is not None:
            step, values = self._recorder.step, out.detach().clone()
            moves = partial(known.updated, step, call.source, made.bases[base][0], values, made)
            self._made_now[_place(out)] = _reference(out), moves
        self._keep(known, out)

    def _moves(self, place: _Place) -> None:
        """What lies there is kept, if it still does."""
        storage, moves = self._made_now.pop(place, (None, None))
        if storage is not None and moves is not None and not storage.expired():  # type: ignore[no-untyped-call]
            moves()

    def _keep(self, known: _Sum, tensor: Tensor) -> _Sum:
        place = _place(tensor)
        if place not in known.storages:
            known.storages[place] = _reference(tensor)
        self._sums[place] = known
        return known

    def _shrinks(self, call: Call, written: list[Tensor]) -> None:
        """A weight decay of the user's own optimizer, by a factor that the weights' type rounds to 1."""
        stepping, factor = self._ledger.here.stepping, call.args[1]
        if not stepping or not isinstance(factor, float) or is_pytorchs(stepping[0]):
            return
        own = {p.data_ptr() for p in parameters_of(stepping[0]) if is_dense(p)}
        half = next((w.dtype for w in written if w.dtype in HALF and w.data_ptr() in own), None)
        if half is not None and factor != 1 and 0.5 < factor < 2:
            name, constants = type(stepping[0]).__name__, {"decay": _rounded(factor, half)}
            self.found(OptimizerStateInHalf, call.source, name, dtype=name_of(half), constants=constants)

    def end(self) -> None:
        self._made.clear()
        for place in list(self._made_now):
            self._moves(place)
        for known in set(self._sums.values()):
            for place, storage in list(known.storages.items()):
                if storage.expired():  # type: ignore[no-untyped-call]
                    del known.storages[place]
                    self._sums.pop(place, None)
            if known.storages and known.steps >= 2 and not known.weights and known.lost:
                known.judge(self._recorder, HalfAccumulator)

    def finish(self) -> None:
        """Judge what became of weights. Waits for the device."""
        for known in self._weights.values():
            if known.lost:
                known.judge(self._recorder, UpdateBelowUlp, by_hand=True)


def _reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _place(tensor: Tensor) -> _Place:
    """Where a tensor's values are, whichever alias it is; nowhere without a storage."""
    if not is_plain(tensor):
        return ()
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel()


#: Gradients whose sums are followed.
GRADIENTS = 64


class Losses(Tracker, Observer):
    """Looks at the losses of each step, and adds up in fp32, on samples, what their backward passes add to
    half-precision gradients."""

    def set_up(self) -> None:
        self._pending: LossInHalfPrecision | None = None
        self._sums: Notes[Tensor] = Notes()

    def on_begins(self, begins: Begins) -> None:
        """One more loss."""
        if not self._recorder.looking:
            return
        chain, passes, source = begins.here.chain, begins.here.cycle.passes, user_line()
        if not any(gradient.state.fresh for gradient in self._ledger.gradients):
            passes.clear()
        passes.append(Pass(source, chain.factor if chain.mean else None, begins.here.leaves))
        if len(passes) > 1:
            self._recorder.facts.add("accumulation")
        if chain.half is None:
            return
        operation, dtype, number = chain.half
        line = "" if self._ledger.look is None else self._ledger.look.lines.get(number, "")
        what: dict[str, Any] = {"operation": operation.removesuffix("0").removesuffix("Backward")}
        what |= {"dtype": name_of(dtype), "autocast": "autocast" in self._recorder.facts}
        scale = self._ledger.scale_of(chain.marks) if chain.marks else None
        event = LossInHalfPrecision(line or source, scale=scale, **what)
        if line:
            self._pending = None
            self._recorder.emit(event)
        elif self._pending is None:
            # A later step may know the line of the loss; until then this is all there is.
            self._pending = event

    def on_stepped(self, stepped: Stepped) -> None:
        """They have fed a step."""
        cycle, name = self._ledger.here.cycle, type(stepped.optimizer).__name__
        multiplied, own = (
            set(cycle.multiplied.values()) or {1.0},
            {*map(id, parameters_of(stepped.optimizer))},
        )
        # Those of other models are none of its business; what it holds may be copies that none reaches.
        mine = [each for each in cycle.passes if each.reached is None or own & each.reached]
        passes = mine or cycle.passes
        if not self._recorder.looking or len({each[:2] for each in passes}) != 1 or len(passes) < 2:
            return
        source, factor, _ = passes[0]
        # What the user's own code multiplies gradients by may be the average; unseen, it may be anything.
        if factor is not None and self._ledger.closely and len(multiplied) == 1:
            factor *= multiplied.pop()
            self.found(AccumulationNotAveraged, source, name, passes=len(passes), factor=factor)
        values = (gradient.value for gradient in self._ledger.present(stepped.optimizer))
        half = sorted({name_of(value.dtype) for value in values if value is not None and value.dtype in HALF})
        if half:
            what = {"dtype": half[0], "terms": len(passes), "error": self._error()}
            self.found(LowPrecisionGradientSum, source, name, **what)

    def finish(self) -> None:
        """Say what was kept for a better line."""
        if self._pending is not None:
            self._recorder.emit(self._pending)

    # ---- sums ------------------------------------------------------------------------------

    def wants_node(self, node: Any, kind: Kind) -> bool:
        name, dtype = kind
        return dtype in HALF and name.endswith("AccumulateGrad")

    def hook(self, node: Any) -> RemovableHandle | None:
        if node.variable.grad is None:
            return None
        return cast("RemovableHandle", node.register_prehook(partial(self._adds, weakref.ref(node.variable))))

    def _adds(self, reference: weakref.ref[Tensor], added: tuple[Tensor | None, ...]) -> None:
        parameter = reference()
        target = None if parameter is None else parameter.grad
        # With a graph of its own the sum is a new tensor.
        if target is None or added[0] is None or not is_plain(target) or torch.is_grad_enabled():
            return
        known = self._sums.of(target)
        if known is None and len(self._sums) >= GRADIENTS:
            return
        with torch._C._DisableTorchDispatch():  # no mode is to see this, nor one of the user's
            before = spread(target).float() if known is None else known
            self._sums.note(target, before + spread(added[0]).float())

    def _error(self) -> float | None:
        """The relative error of the sums since the step began; waits for the device."""
        errors, tiny = [], torch.finfo(torch.float32).tiny
        for reference, wide in self._sums.values():
            if (target := reference()) is not None:
                errors.append(float((spread(target).float() - wide).norm() / wide.norm().clamp_min(tiny)))
        return max(errors, default=None)

    def end(self) -> None:
        self._sums.clear()
