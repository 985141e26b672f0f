"""Checkpoints and schedules: the scaler's state saved and loaded, schedulers that go on without the "
"optimizer."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tilefit.precision.events import ScalerNotLoaded, ScalerNotSaved, SchedulerStepped
from tilefit.precision.ledger import Ledger, Stepped
from tilefit.precision.lines import user_line
from tilefit.precision.patches import Patches, with_subclasses
from tilefit.precision.recorder import Recorder

#: How deep a checkpoint is searched.
_DEPTH = 4


class Checkpoints:
    """Looks whether the scaler is saved and loaded with the optimizer.

    A checkpoint may be several files, so a missing scaler is judged at the next step, or at the end.
    """

    def __init__(self, recorder: Recorder, ledger: Ledger, patches: Patches) -> None:
        self._recorder = recorder
        self._ledger = ledger
        self._patches = patches
        self._saved_at = ""
        self._scaler_saved = False
        self._loaded_at = ""
        ledger.on_stepped.append(lambda stepped: self.judge())

    def start(self) -> None:
        """Begin."""
        self._patches.wrap(torch, "save", self._around_save)
        self._patches.wrap(Optimizer, "load_state_dict", self._around_load)
        distributed = sys.modules.get("torch.distributed.checkpoint")
        if distributed is not None:
            self._patches.wrap(distributed, "save", self._around_save)

    def _around_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, *args: Any, **kw: Any) -> Any:
            if _holds(obj, _is_scaler):
                self._scaler_saved = True
            elif _holds(obj, _is_optimizer):
                self._saved_at = user_line()
            return original(obj, *args, **kw)

        return save

    def _around_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load_state_dict(optimizer: Optimizer, *args: Any, **kw: Any) -> None:
            original(optimizer, *args, **kw)
            if optimizer.state:  # else it only changed places, before the first step
                self._loaded_at = user_line()

        return load_state_dict

    def judge(self) -> None:
        """What was saved and loaded since the last step is complete now."""
        used = [known for scaler, known in self._ledger.scalers if scaler._enabled and known.used]
        if self._saved_at and not self._scaler_saved and used:
            self._recorder.emit(ScalerNotSaved(source=self._saved_at))
        self._saved_at, self._scaler_saved = "", False
        if self._loaded_at and used and not any(known.loaded for known in used):
            self._recorder.emit(ScalerNotLoaded(source=self._loaded_at))
        self._loaded_at = ""


class Schedules:
    """Looks whether schedulers step after steps that the scaler skipped."""

    def __init__(self, recorder: Recorder, ledger: Ledger, patches: Patches) -> None:
        self._recorder = recorder
        self._patches = patches
        self._asked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._all: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._skipped: weakref.WeakKeyDictionary[Optimizer, bool | None] = weakref.WeakKeyDictionary()
        self._counted: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._depth = 0
        ledger.on_stepped.append(self._on_stepped)

    def start(self) -> None:
        """Begin."""
        for scheduler in with_subclasses(LRScheduler):
            if "step" in vars(scheduler):
                self._patches.wrap(scheduler, "step", self._around_step)

    def _on_stepped(self, stepped: Stepped) -> None:
        optimizer = stepped.optimizer
        self._asked[optimizer] = self._asked.get(optimizer, 0) + 1
        self._all[optimizer] = self._all.get(optimizer, 0) + 1
        self._skipped[optimizer] = stepped.skipped
        if stepped.scaler is not None and stepped.skipped is None:
            self._recorder.cannot_check(
                "AMP021, AMP029: steps skipped by a fused optimizer, which only the device knows"
            )

    def _around_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scheduler: Any, *args: Any, **kw: Any) -> None:
            outermost = self._depth == 0
            self._depth += 1
            try:
                original(scheduler, *args, **kw)
            finally:
                self._depth -= 1
            optimizer = getattr(scheduler, "optimizer", None)
            if outermost and isinstance(optimizer, Optimizer):
                self._judge(optimizer)

        return step

    def _judge(self, optimizer: Optimizer) -> None:
        asked = self._asked.get(optimizer, 0)
        self._asked[optimizer] = 0
        # A scheduler that steps once in many steps counts epochs, not steps.
        if asked != 1 or not self._skipped.get(optimizer):
            return
        self._counted[optimizer] = self._counted.get(optimizer, 0) + 1
        self._recorder.emit(
            SchedulerStepped(
                source=user_line(),
                module=type(optimizer).__name__,
                skipped=self._counted[optimizer],
                steps=self._all[optimizer],
            )
        )


def _holds(obj: Any, is_it: Callable[[Any], bool], depth: int = _DEPTH) -> bool:
    if is_it(obj):
        return True
    if depth == 0:
        return False
    if isinstance(obj, Mapping):
        return any(_holds(value, is_it, depth - 1) for value in obj.values())
    if isinstance(obj, list | tuple):
        return any(_holds(value, is_it, depth - 1) for value in obj)
    return False


def _is_optimizer(obj: Any) -> bool:
    return isinstance(obj, Mapping) and "state" in obj and "param_groups" in obj


def _is_scaler(obj: Any) -> bool:
    return isinstance(obj, torch.amp.GradScaler) or (
        isinstance(obj, Mapping) and "_growth_tracker" in obj and "growth_factor" in obj
    )
