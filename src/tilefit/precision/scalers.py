"""The gradient scalers: what they scale, divide, skip and update; whether they are saved and loaded; and
schedules that go on where they skip."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from tilefit.precision import graph
from tilefit.precision.ledger import Running, Scaler, Scales, Stepped, Tracker, enabled, scale_of
from tilefit.precision.lines import user_line
from tilefit.precision.patches import Around, Patch, of_all
from tilefit.precision.rules.scaler import ScaleCollapse, ScalerNotRestored, ScheduleAdvancesOnSkip, refused
from tilefit.precision.tensors import parameters_of

#: From so many skipped steps in a row on, the losses are looked at.
MANY_SKIPS = 3
#: The rules that follow a loss scale.
_OF_SCALERS = tuple(f"AMP{n:03}" for n in (1, 2, 3, 5, 6, 7, 8, 19, 20, 21, 29))
#: How deep a checkpoint is searched.
_DEPTH = 4


class Scalers(Tracker):
    """Tells the ledger what gradient scalers do, and judges what becomes of their scale."""

    def patches(self) -> list[Patch]:
        """The scalers' methods."""
        methods: dict[str, Around] = {"scale": self._scale, "unscale_": self._unscale, "step": self._step}
        methods |= {"update": self._update, "load_state_dict": self._load}
        return of_all(torch.amp.GradScaler, **methods)

    def _scale(self, scaler: Any, outputs: Any) -> Running:
        if not enabled(scaler):
            if getattr(scaler, "_device", "") == "cuda" and not torch.cuda.is_available():
                self._ledger.here.cycle.scale_met = True  # on a GPU there would be one
                what = "the gradient scaler, which is off without CUDA: --gpu NAME emulates a GPU"
                self._recorder.cannot_check(what, *_OF_SCALERS)
            return
        self._recorder.tell(Scales(outputs))
        scaled = yield
        known = self._ledger.scaler(scaler)
        self._recorder.facts.add("loss scale")
        known.scaled_at, mark = user_line(), known.mark
        if known.skipped and isinstance(outputs, Tensor):
            # The step before was skipped, for which the scaler has waited for the device already.
            finite = bool(torch.isfinite(outputs.detach()).all())
            known.bad_losses = 0 if finite else known.bad_losses + 1
        # An iterator is left alone, as it can be read once only.
        for tensor in tree_leaves(scaled):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                node: Any = tensor.grad_fn
                node.metadata[graph.MARK] = mark
                tensor.register_hook(lambda _, mark=mark: self._ledger.reach(mark))  # type: ignore[no-untyped-call]

    def _unscale(self, scaler: Any, optimizer: Optimizer) -> Running:
        if not enabled(scaler):
            return
        ledger = self._ledger
        here = ledger.here
        ledger.adopt(optimizer)
        ledger.observe(here)
        ledger.divide(scaler, optimizer)
        with here.at_work(), self._explained("unscale_", optimizer):
            yield
        ledger.written(ledger.present(optimizer), alike=True)

    def _step(self, scaler: Any, optimizer: Optimizer, *args: Any, **kw: Any) -> Running:
        if not enabled(scaler):
            return
        ledger = self._ledger
        here = ledger.here
        ledger.adopt(optimizer)
        known = ledger.scaler(scaler)
        if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED:
            ledger.observe(here)
            ledger.steps(optimizer, scaler=True)
        here.scaler_step, here.ran = (scaler, optimizer), False
        try:
            with here.at_work(), self._explained("step", optimizer):
                yield
        finally:
            here.scaler_step = None
        skipped = None if getattr(optimizer, "_step_supports_amp_scaling", False) else not here.ran
        if skipped:
            known.skipped += 1
        elif skipped is False:
            known.skipped = known.bad_losses = 0
        known.stepped[id(optimizer)] = type(optimizer).__name__
        ledger.used(here, Stepped(optimizer, skipped, scaler, plain=False))

    def _update(self, scaler: Any, *args: Any, **kw: Any) -> Running:
        if not enabled(scaler):
            return
        known = self._ledger.scaler(scaler)
        known.previous = None if scaler._scale is None else scaler._scale.clone()
        with self._explained("update", None):
            yield
        known.generation += 1
        known.stepped_before, known.stepped = known.stepped, {}
        if known.skipped >= MANY_SKIPS:
            self._judge_history(scaler, known)

    def _load(self, scaler: Any, *args: Any, **kw: Any) -> Running:
        yield
        self._ledger.scaler(scaler).loaded = True

    def on_stepped(self, stepped: Stepped) -> None:
        """Judge the scale, as fused optimizers skip steps on the device."""
        if self._recorder.looking and stepped.scaler is not None:
            self._recorder.scale = scale = scale_of(stepped.scaler)
            self._recorder.first_scale = self._recorder.first_scale or scale
            known = self._ledger.scaler(stepped.scaler)
            if known.skipped < MANY_SKIPS and scale < 1:
                self._judge_history(stepped.scaler, known)

    def _judge_history(self, scaler: Any, known: Scaler) -> None:
        scale, bad = scale_of(scaler), known.bad_losses >= MANY_SKIPS - 1
        if bad or scale < 1:
            self._recorder.look_soon = True
            what = {"scale": scale, "skipped": known.skipped, "loss_finite": False if bad else None}
            self.found(ScaleCollapse, known.scaled_at, **what)

    @contextmanager
    def _explained(self, method: str, optimizer: Optimizer | None) -> Iterator[None]:
        """Within the block a method of the scaler runs; where it raises, say why before it does."""
        try:
            yield
        except (RuntimeError, ValueError, AssertionError) as error:
            weights = parameters_of(optimizer) if optimizer else []
            half = sum(weight.dtype == torch.float16 for weight in weights)
            what = refused(user_line(), method, str(error), half, len(weights))
            if what is not None:
                self._recorder.emit(what)
            raise


class Checkpoints(Tracker):
    """Looks whether the scaler is saved and loaded with the optimizer.

    A checkpoint may be several files, so a missing scaler is judged at the next step, or at the end.
    """

    _saved_at = _loaded_at = ""
    _scaler_saved = False

    def patches(self) -> list[Patch]:
        """What saves and loads."""
        savers = filter(None, (torch, sys.modules.get("torch.distributed.checkpoint")))
        saves: list[Patch] = [(saver, "save", self._save) for saver in savers]
        return [*saves, (Optimizer, "load_state_dict", self._load)]

    def _save(self, obj: Any, *args: Any, **kw: Any) -> Running:
        if _holds(obj, _is_scaler):
            self._scaler_saved = True
        elif _holds(obj, _is_optimizer):
            self._saved_at = user_line()
        yield

    def _load(self, optimizer: Optimizer, *args: Any, **kw: Any) -> Running:
        yield
        if optimizer.state:  # else it only changed places, before the first step
            self._loaded_at = user_line()

    def on_stepped(self, stepped: Stepped) -> None:
        """What was saved and loaded is complete now."""
        self.finish()

    def finish(self) -> None:
        """What was saved and loaded since the last step is complete now."""
        used = [known for scaler, known in self._ledger.scalers if scaler._enabled and known.scaled_at]
        if self._saved_at and not self._scaler_saved and used:
            self.found(ScalerNotRestored, self._saved_at, what="saved")
        if self._loaded_at and used and not any(known.loaded for known in used):
            self.found(ScalerNotRestored, self._loaded_at, what="loaded")
        self._saved_at, self._scaler_saved, self._loaded_at = "", False, ""


class Schedules(Tracker):
    """Looks whether schedulers step after steps that the scaler skipped."""

    def set_up(self) -> None:
        #: Of each optimizer: its steps, also ``since`` its scheduler stepped; whether the last was skipped;
        #: and how often its scheduler stepped all the same.
        self._steps: weakref.WeakKeyDictionary[Optimizer, Counter[str]] = weakref.WeakKeyDictionary()

    def patches(self) -> list[Patch]:
        """The schedulers' steps."""
        return of_all(LRScheduler, step=self._step)

    def on_stepped(self, stepped: Stepped) -> None:
        """A step was asked for."""
        steps = self._steps.setdefault(stepped.optimizer, Counter())
        steps.update(all=1, since=1)
        steps["last"] = bool(stepped.skipped)
        if stepped.scaler is not None and stepped.skipped is None:
            what = "steps skipped by a fused optimizer, which only the device knows"
            self._recorder.cannot_check(what, "AMP021", "AMP029")

    def _step(self, scheduler: Any, *args: Any, **kw: Any) -> Running:
        yield
        self._recorder.facts.add("schedule")
        optimizer = getattr(scheduler, "optimizer", None)
        steps = self._steps.get(optimizer, Counter()) if isinstance(optimizer, Optimizer) else Counter()
        since, steps["since"] = steps["since"], 0
        # A scheduler that steps once in many steps counts epochs, not steps.
        if since == 1 and steps["last"]:
            steps["skipped"] += 1
            what = {"skipped": steps["skipped"], "steps": steps["all"]}
            self.found(ScheduleAdvancesOnSkip, None, type(optimizer).__name__, **what)


def _holds(obj: Any, is_it: Callable[[Any], bool], depth: int = _DEPTH) -> bool:
    if is_it(obj):
        return True
    inner = obj.values() if isinstance(obj, Mapping) else obj if isinstance(obj, list | tuple) else ()
    return depth > 0 and any(_holds(value, is_it, depth - 1) for value in inner)


def _is_optimizer(obj: Any) -> bool:
    return isinstance(obj, Mapping) and "state" in obj and "param_groups" in obj


def _is_scaler(obj: Any) -> bool:
    state = isinstance(obj, Mapping) and "_growth_tracker" in obj and "growth_factor" in obj
    return state or isinstance(obj, torch.amp.GradScaler)
