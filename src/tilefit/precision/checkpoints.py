"""Checkpoints and schedules: the scaler's state saved and loaded, schedules that go on alone."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tilefit.precision.events import ScalerNotLoaded, ScalerNotSaved, SchedulerStepped
from tilefit.precision.ledger import Ledger, Running, Stepped
from tilefit.precision.lines import user_line
from tilefit.precision.patches import Patches, of_all
from tilefit.precision.recorder import Recorder

#: How deep a checkpoint is searched.
_DEPTH = 4


class Checkpoints:
    """Looks whether the scaler is saved and loaded with the optimizer.

    A checkpoint may be several files, so a missing scaler is judged at the next step, or at the end.
    """

    def __init__(self, recorder: Recorder, ledger: Ledger) -> None:
        self._recorder = recorder
        self._ledger = ledger
        self._saved_at = ""
        self._scaler_saved = False
        self._loaded_at = ""
        recorder.on(Stepped, lambda _: self.judge())

    def start(self, patches: Patches) -> None:
        """Begin."""
        patches.apply((torch, "save", self._save), (Optimizer, "load_state_dict", self._load))
        distributed = sys.modules.get("torch.distributed.checkpoint")
        if distributed is not None:
            patches.apply((distributed, "save", self._save))

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

    def judge(self) -> None:
        """What was saved and loaded since the last step is complete now."""
        used = [known for scaler, known in self._ledger.scalers if scaler._enabled and known.scaled_at]
        if self._saved_at and not self._scaler_saved and used:
            self._recorder.emit(ScalerNotSaved(source=self._saved_at))
        self._saved_at, self._scaler_saved = "", False
        if self._loaded_at and used and not any(known.loaded for known in used):
            self._recorder.emit(ScalerNotLoaded(source=self._loaded_at))
        self._loaded_at = ""


@dataclass(slots=True)
class _Steps:
    """An optimizer's steps: those asked for since its scheduler stepped, all of them, whether the last was
    skipped, and how often its scheduler has stepped all the same."""

    asked: int = 0
    all: int = 0
    skipped: bool | None = None
    counted: int = 0


class Schedules:
    """Looks whether schedulers step after steps that the scaler skipped."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._steps: weakref.WeakKeyDictionary[Optimizer, _Steps] = weakref.WeakKeyDictionary()
        recorder.on(Stepped, self._on_stepped)

    def start(self, patches: Patches) -> None:
        """Begin."""
        patches.apply(*of_all(LRScheduler, step=self._step))

    def _on_stepped(self, stepped: Stepped) -> None:
        steps = self._steps.setdefault(stepped.optimizer, _Steps())
        steps.asked += 1
        steps.all += 1
        steps.skipped = stepped.skipped
        if stepped.scaler is not None and stepped.skipped is None:
            self._recorder.cannot_check(
                "steps skipped by a fused optimizer, which only the device knows", "AMP021", "AMP029"
            )

    def _step(self, scheduler: Any, *args: Any, **kw: Any) -> Running:
        yield
        self._recorder.facts.add("schedule")
        optimizer = getattr(scheduler, "optimizer", None)
        steps = self._steps.get(optimizer) if isinstance(optimizer, Optimizer) else None
        if steps is None:
            return
        asked, steps.asked = steps.asked, 0
        # A scheduler that steps once in many steps counts epochs, not steps.
        if asked == 1 and steps.skipped:
            steps.counted += 1
            self._recorder.emit(
                SchedulerStepped(
                    source=user_line(),
                    module=type(optimizer).__name__,
                    skipped=steps.counted,
                    steps=steps.all,
                )
            )


def _holds(obj: Any, is_it: Callable[[Any], bool], depth: int = _DEPTH) -> bool:
    if is_it(obj):
        return True
    inner = obj.values() if isinstance(obj, Mapping) else obj if isinstance(obj, list | tuple) else ()
    return depth > 0 and any(_holds(value, is_it, depth - 1) for value in inner)


def _is_optimizer(obj: Any) -> bool:
    return isinstance(obj, Mapping) and "state" in obj and "param_groups" in obj


def _is_scaler(obj: Any) -> bool:
    return isinstance(obj, torch.amp.GradScaler) or (
        isinstance(obj, Mapping) and "_growth_tracker" in obj and "growth_factor" in obj
    )
