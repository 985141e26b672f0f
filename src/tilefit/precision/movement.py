"""Whether half-precision values move as they should: parameters under their optimizer, averages under
updates.

The measure is the projection of the actual movement on the intended one, sum(actual * intended) /
sum(intended²): 1 where all is well, also with stochastic rounding, and 0 where every update is rounded away.
Counting values that did not change would accuse stochastic rounding.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from tilefit.emulation.tensor import CudaTensor
from tilefit.precision.degrees import base_name
from tilefit.precision.ledger import Stepped, Stepping, Tracker
from tilefit.precision.lines import user_line
from tilefit.precision.look import FORWARD, OPEN, Call, Observer
from tilefit.precision.recorder import Recorder
from tilefit.precision.rules.storage import (
    ENOUGH,
    HalfAccumulator,
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
    targets,
)

#: Steps a parameter is followed for, and those after which it is measured; before ENOUGH that is a note.
STEPS = 32
_MEASURED = (3, 6, 10, 15, 20, 25, 30, STEPS)
#: Parameters followed per group.
PARAMETERS = 64
#: Optimizers that treat every element by itself, so that a sample of elements behaves as the whole tensor
#: does.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD")


class Weights(Tracker):
    """Follows half-precision parameters with the same optimizer in fp32, and looks once at the element types
    of each optimizer's state, and at its constants in them."""

    def set_up(self) -> None:
        self._following: weakref.WeakKeyDictionary[Optimizer, _Follower | None] = weakref.WeakKeyDictionary()
        #: What was measured of each optimizer, which may be gone at the end.
        self._measured: list[list[_Moved]] = []
        self._states: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def on_stepping(self, stepping: Stepping) -> None:
        """The twin of an optimizer that is about to step makes its step."""
        optimizer = stepping.optimizer
        if optimizer not in self._following:
            self._following[optimizer] = self._begin(optimizer)
        follower = self._following[optimizer]
        if follower is not None:
            follower.step(optimizer)

    def _begin(self, optimizer: Optimizer) -> _Follower | None:
        half = [parameter for parameter in parameters_of(optimizer) if parameter.dtype in HALF]
        if not half or any(isinstance(parameter, CudaTensor) for parameter in half):
            return None
        name = type(optimizer).__name__
        base = next((c for c in type(optimizer).__mro__ if c.__module__.startswith("torch.optim.")), None)
        if base is None or base.__name__ not in _ELEMENTWISE or not all(map(is_plain, half)):
            what = f"half-precision weights under {name}, whose intended step is not known"
            self._recorder.cannot_check(what, "AMP013")
            return None
        with self._ledger.here.at_work():  # the twin is nobody's
            follower = _Follower(optimizer, base)
        self._measured.append(follower.moved)
        return follower

    def on_stepped(self, stepped: Stepped) -> None:
        """The optimizer has followed its twin, or not."""
        optimizer = stepped.optimizer
        if stepped.skipped:
            return
        # Others may keep their constants elsewhere, or quantise on purpose.
        if optimizer not in self._states and type(optimizer).__module__.startswith("torch.optim."):
            for event in _half_states(optimizer):
                self._recorder.emit(event)
        self._states.add(optimizer)
        follower = self._following.get(optimizer)
        if follower is None:
            return
        follower.steps += 1
        if follower.steps in _MEASURED:
            follower.measure(user_line())
        if follower.steps >= STEPS:
            self._following[optimizer] = None
            self._measured.remove(follower.moved)
            self._judge(follower.moved)

    def finish(self) -> None:
        """Judge what was followed. Waits for the device."""
        for measured in self._measured:
            if not measured or measured[0].steps < ENOUGH:
                what = f"whether updates are lost over {ENOUGH} steps: fewer were made"
                self._recorder.cannot_check(what, "AMP013")
            self._judge(measured)

    def _judge(self, measured: list[_Moved]) -> None:
        for moved in measured:
            moved.judge(self._recorder, UpdateBelowUlp)


@dataclass(slots=True, eq=False)
class _Moved:
    """How far some values have moved: the actual and the intended movement times the intended one."""

    source: str = ""
    module: str = ""
    dtype: str = ""
    steps: int = 0
    number: int = 0
    products: Tensor | None = None

    def judge(self, recorder: Recorder, rule: type[Movement]) -> None:
        """Say how far of what was intended. Waits for the device."""
        product, square = (0.0, 0.0) if self.products is None else self.products.tolist()
        if square > 0:
            of: dict[str, Any] = {"dtype": self.dtype, "steps": self.steps, "number": self.number}
            recorder.emit(rule(self.source, self.module, projection=product / square, **of))


class _Follower:
    """The sampled elements of an optimizer's half-precision parameters, under its twin in fp32."""

    def __init__(self, optimizer: Optimizer, base: type[Optimizer]) -> None:
        self._name = type(optimizer).__name__
        self.moved: list[_Moved] = []
        self.steps = 0
        self._samples: list[tuple[list[Tensor], Tensor, Tensor, torch.dtype]] = []
        #: The group of the optimizer's that each of the twin's stands for.
        self._origins: list[int] = []
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            alike: dict[Any, list[Tensor]] = {}
            for parameter in sorted(group["params"], key=lambda p: -p.numel()):
                if parameter.dtype in HALF and parameter.numel():
                    alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
            kept = {k: v for k, v in group.items() if k not in ("params", "initial_lr", "param_names")}
            for (dtype, _), parameters in alike.items():
                start = _sampled(parameters[:PARAMETERS])
                twin = start.clone().requires_grad_()
                self._samples.append((parameters[:PARAMETERS], start, twin, dtype))
                self._origins.append(number)
                groups.append({**kept, "params": [twin], "foreach": False, "fused": False})
        self._twin = base(groups, lr=1e-3)  # type: ignore[call-arg]
        # The step below its hooks, which are global: the twin's steps are nobody's business.
        self._step = getattr(type(self._twin).step, "__wrapped__", type(self._twin).step)
        for parameters, _, twin, _ in self._samples:
            states = [optimizer.state.get(p, {}) for p in parameters]
            for key, value in states[0].items() if all(states) else ():
                if isinstance(value, Tensor) and value.shape == parameters[0].shape:
                    self._twin.state[twin][key] = _sampled([state[key] for state in states])
                else:
                    # Step counts of fused optimizers are on the device, the twin's are not.
                    self._twin.state[twin][key] = value.cpu().clone() if isinstance(value, Tensor) else value

    def step(self, optimizer: Optimizer) -> None:
        """Make the twin's step."""
        for parameters, _, twin, _ in self._samples:
            twin.grad = _sampled([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        for group, number in zip(self._twin.param_groups, self._origins, strict=True):
            group["lr"] = optimizer.param_groups[number]["lr"]
        self._step(self._twin)

    def measure(self, source: str) -> None:
        """See how far the parameters of each group and element type have moved after a step on a line."""
        self.moved.clear()
        for parameters, start, twin, dtype in self._samples:
            intended = twin.detach() - start
            products = (torch.stack([_sampled(parameters) - start, intended]) * intended).sum(1)
            of = name_of(dtype), self.steps, start.numel(), products
            self.moved.append(_Moved(source, self._name, *of))


def _sampled(tensors: list[Tensor]) -> Tensor:
    """Up to about :data:`VALUES` elements of each tensor, in fp32, one after the other."""
    return torch.cat([spread(tensor) for tensor in tensors]).float()


def _half_states(optimizer: Optimizer) -> Iterator[OptimizerStateInHalf]:
    """The constants of an optimizer of PyTorch's in the element types of its state."""
    for group in optimizer.param_groups:
        half = next((p for p in group["params"] if p.dtype in HALF and p.grad is not None), None)
        if half is None:
            continue
        state = optimizer.state.get(half, {})
        kept = [v.dtype for v in state.values() if isinstance(v, Tensor) and v.shape == half.shape]
        dtype = next((d for d in kept if d in HALF), None)
        lr, decay, betas = group.get("lr"), group.get("weight_decay"), group.get("betas")
        name, used = type(optimizer).__name__, dtype or half.dtype
        decoupled = group.get("decoupled_weight_decay") or "AdamW" in name
        shrink = 1 - float(lr) * float(decay) if decoupled and decay and lr is not None else None
        if dtype is None and shrink is None:
            continue
        constants = {}
        if dtype is not None and "eps" in group:
            constants["eps"] = _rounded(float(group["eps"]), dtype)
        if dtype is not None and betas:
            constants["beta2"] = _rounded(float(betas[1]), dtype)
        if shrink is not None:
            constants["decay"] = _rounded(shrink, half.dtype)
        yield OptimizerStateInHalf(user_line(), name, dtype=name_of(used), constants=constants)


def _rounded(value: float, dtype: torch.dtype) -> tuple[float, float]:
    return value, torch.tensor(value, dtype=torch.float64).to(dtype).item()


@dataclass(slots=True, eq=False)
class _Sum(_Moved):
    """What is known of one tensor that is updated again and again: where it lies now, and how it moved."""

    storages: dict[tuple[Any, ...], StorageWeakRef] = field(default_factory=dict)
    looks: int = 0
    fresh: bool = False

    def add(self, source: str, dtype: torch.dtype, moved: Tensor, intended: Tensor) -> None:
        """It has moved."""
        products = torch.stack([(moved * intended).sum(), (intended * intended).sum()])
        self.products = products if self.products is None else self.products + products
        self.source, self.dtype = source, name_of(dtype)
        self.steps += 1
        self.fresh = True
        self.number = moved.numel()


class Accumulators(Tracker, Observer):
    """Follows half-precision tensors, not parameters or gradients, that are updated step after step: in
    place, or by a new tensor made of the old one. They are known by their storage: any alias may be used."""

    phases = (FORWARD, OPEN)

    def set_up(self) -> None:
        self._sums: dict[tuple[Any, ...], _Sum] = {}
        self._old: list[tuple[Tensor, Tensor, Tensor]] = []
        #: Products of this step, in fp32, and what was multiplied.
        self._products: Notes[tuple[Tensor, Tensor]] = Notes()
        #: Tensors made out of old ones in this step, which have moved if they are kept: what says so.
        self._made_now: dict[tuple[Any, ...], tuple[StorageWeakRef, Callable[[], None]]] = {}

    def wants(self, func: Any, name: str) -> bool:
        return base_name(name) in ("add", "mul", "lerp", "sub", "copy", "clone")

    def before(self, call: Call) -> None:
        self._old = []
        if not call.name.endswith("_"):
            return
        name, here = base_name(call.name), self._ledger.here
        if here.in_use:
            if name == "mul" and here.stepping:
                self._shrinks(call, here.stepping[0])
        elif name != "copy":
            for index, target in enumerate(targets(call.func, call.args, call.kwargs)):
                # What a graph has made is an activation of this step.
                mine = target.dtype in HALF and has_values(target) and target.is_leaf
                if mine and not self._ledger.knows(target):
                    old = spread(target).float()
                    new = self._intended(call, index, target, old)
                    if new is not None:
                        self._old.append((target, old, new))

    def after(self, call: Call) -> None:
        name = base_name(call.name)
        for target, old, new in self._old:
            total = self._sums.get(_place(target)) or _Sum()
            self._keep(total, target)
            total.add(call.source, target.dtype, spread(target).float() - old, new - old)
        if self._old or self._ledger.here.in_use:
            return
        outs = call.out if isinstance(call.out, list | tuple) else [call.out]
        moved = name in ("copy", "clone")
        values = [call.args[name == "copy"]] if moved else outs
        if not any(isinstance(value, Tensor) and value.dtype in HALF for value in values):
            return
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors()):
            return
        if moved:
            place = _place(values[0]) if is_plain(values[0]) else ()
            known = self._sums.get(place)
            if known is not None:
                self._keep(known, call.out)
                self._moves(place)
        elif not call.name.endswith("_"):
            for index, out in enumerate(outs):
                if isinstance(out, Tensor) and out.dtype in HALF and has_values(out):
                    self._made(call, name, index, out)

    def _made(self, call: Call, name: str, index: int, out: Tensor) -> None:
        """A new tensor may be a product, or the old tensor's successor."""
        first, *others = (_item(argument, index) for argument in call.args)
        if not isinstance(first, Tensor) or first.shape != out.shape or first.dtype not in HALF:
            return
        second = others[0] if others and isinstance(others[0], Tensor) else first
        if name == "mul":
            if not isinstance(others[0], Tensor) or others[0].numel() == 1:
                self._products.note(out, (spread(first).float() * others[0], first))
            return
        new = self._intended(call, index, out, self._wide(first))
        if new is None:
            return
        bases = [(self._products.of(tensor) or (None, tensor))[1] for tensor in (first, second)]
        found = [(known, base) for base in bases if (known := self._sums.get(_place(base))) is not None]
        for known, base in found[:1]:
            old, storage = spread(base).float(), StorageWeakRef(out.untyped_storage())  # type: ignore[no-untyped-call]
            moved = partial(known.add, call.source, out.dtype, spread(out).float() - old, new - old)
            self._made_now[_place(out)] = storage, moved
        # Where nothing has moved yet this may be the first of them.
        self._keep(found[0][0] if found else _Sum(), out)

    def _moves(self, place: tuple[Any, ...]) -> None:
        """What lies there is kept, if it still does."""
        storage, moved = self._made_now.pop(place, (None, None))
        if storage is not None and moved is not None and not storage.expired():  # type: ignore[no-untyped-call]
            moved()

    def _wide(self, tensor: Tensor) -> Tensor:
        product = self._products.of(tensor)
        return spread(tensor).float() if product is None else product[0]

    def _keep(self, known: _Sum, tensor: Tensor) -> None:
        place = _place(tensor)
        if place not in known.storages:
            known.storages[place] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._sums[place] = known

    def _intended(self, call: Call, index: int, target: Tensor, old: Tensor) -> Tensor | None:
        """What the sampled elements become in fp32; None where the operands do not fit them element by
        element."""
        operands: list[Any] = []
        for value in (_item(argument, index) for argument in call.args[1:]):
            if isinstance(value, Tensor):
                fits = value.shape == target.shape
                if not fits and value.numel() != 1:
                    return None
                operands.append(self._wide(value) if fits else value.detach().float())
            else:
                operands.append(value)
        name, alpha = base_name(call.name), call.kwargs.get("alpha", 1)
        change: Tensor = operands[0] * (alpha if name == "add" else -alpha)
        if name == "mul":
            change = old * (operands[0] - 1)
        elif name == "lerp":
            change = (operands[1] if len(operands) > 1 else call.kwargs["weight"]) * (operands[0] - old)
        return old + change

    def _shrinks(self, call: Call, optimizer: Optimizer) -> None:
        """A weight decay of the user's own optimizer, by a factor that the weights' type rounds to 1."""
        factor = call.args[1]
        if not isinstance(factor, float) or type(optimizer).__module__.startswith("torch.optim."):
            return
        weights = targets(call.func, call.args, call.kwargs)
        own = {p.data_ptr() for p in parameters_of(optimizer) if is_dense(p)}
        half = next((w.dtype for w in weights if w.dtype in HALF and w.data_ptr() in own), None)
        if half is not None and factor != 1 and 0.5 < factor < 2:
            place, constants = (call.source, type(optimizer).__name__), {"decay": _rounded(factor, half)}
            self._recorder.emit(OptimizerStateInHalf(*place, dtype=name_of(half), constants=constants))

    def end(self) -> None:
        self._products.clear()
        for place in list(self._made_now):
            self._moves(place)
        for optimizer in self._ledger.optimizers:
            for state in list(optimizer.state.values()):
                for value in state.values():
                    if isinstance(value, Tensor) and value.dtype in HALF and is_plain(value):
                        self._sums.pop(_place(value), None)
        for known in {id(known): known for known in self._sums.values()}.values():
            for place, storage in list(known.storages.items()):
                if storage.expired():  # type: ignore[no-untyped-call]
                    del known.storages[place]
                    self._sums.pop(place, None)
            known.looks += known.fresh
            known.fresh = False
            if known.storages and known.looks >= 2:
                known.judge(self._recorder, HalfAccumulator)


def _item(argument: Any, index: int) -> Any:
    """What of an argument is one tensor's, where an operation is on several."""
    return argument[index] if isinstance(argument, list | tuple) else argument


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor's values are, whichever alias it is."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel()
