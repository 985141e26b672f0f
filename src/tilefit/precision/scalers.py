"""The gradient scalers' methods: what they scale, divide, skip and update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tilefit.precision import graph
from tilefit.precision.events import ScaleHistory, ScalerRefused
from tilefit.precision.ledger import Ledger, Running, Scaler, Stepped, enabled, scale_of
from tilefit.precision.lines import user_line
from tilefit.precision.patches import Patches, of_all
from tilefit.precision.recorder import Recorder

#: From so many skipped steps in a row on, the losses are looked at.
MANY_SKIPS = 3


class Scalers:
    """Tells the ledger what gradient scalers do, and judges what becomes of their scale.

    Args:
        recorder: Where events go.
        ledger: Holds the gradients' states.
    """

    def __init__(self, recorder: Recorder, ledger: Ledger) -> None:
        self._recorder = recorder
        self._ledger = ledger

    def start(self, patches: Patches) -> None:
        """Begin."""
        table = of_all(
            torch.amp.GradScaler,
            scale=self._scale,
            unscale_=self._unscale,
            step=self._step,
            update=self._update,
            load_state_dict=self._load,
        )
        patches.apply(*table)

    def _scale(self, scaler: Any, outputs: Any) -> Running:
        if not enabled(scaler):
            return
        scaled = yield
        known = self._ledger.scaler(scaler)
        self._recorder.facts.add("loss scale")
        known.scaled_at = user_line()
        mark = known.mark
        if known.skipped and isinstance(outputs, Tensor):
            # The step before was skipped, for which the scaler has waited for the device already.
            finite = bool(torch.isfinite(outputs.detach()).all())
            known.bad_losses = 0 if finite else known.bad_losses + 1
        for tensor in _tensors(scaled):
            if tensor.requires_grad and tensor.grad_fn is not None:
                node: Any = tensor.grad_fn
                node.metadata[graph.MARK] = mark
                tensor.register_hook(lambda _, mark=mark: self._ledger.reach(mark))  # type: ignore[no-untyped-call]

    def _unscale(self, scaler: Any, optimizer: Optimizer) -> Running:
        if not enabled(scaler):
            return
        ledger = self._ledger
        here = ledger.here
        ledger.adopt(optimizer)
        ledger.owned(here, optimizer)
        ledger.observe(here)
        ledger.divide(here, scaler, optimizer)
        with here.at_work(), self._explained("unscale_", optimizer):
            yield
        ledger.written(here, ledger.of(optimizer))

    def _step(self, scaler: Any, optimizer: Optimizer, *args: Any, **kw: Any) -> Running:
        if not enabled(scaler):
            return
        ledger = self._ledger
        here = ledger.here
        ledger.adopt(optimizer)
        known = ledger.scaler(scaler)
        here.scaler_step, here.ran = (scaler, optimizer), False
        try:
            with here.at_work(), self._explained("step", optimizer):
                yield
        finally:
            here.scaler_step = None
        skipped = None if getattr(optimizer, "_step_supports_amp_scaling", False) else not here.ran
        if skipped is not None:
            known.skipped = known.skipped + 1 if skipped else 0
            if not skipped:
                known.bad_losses = 0
        known.stepped[id(optimizer)] = type(optimizer).__name__
        ledger.used(here, Stepped(optimizer, skipped, scaler, plain=False))

    def _update(self, scaler: Any, *args: Any, **kw: Any) -> Running:
        if not enabled(scaler):
            return
        known = self._ledger.scaler(scaler)
        mark = known.mark
        left = any(mark in gradient.state.marks for gradient in self._ledger.gradients)
        known.previous = scaler._scale.clone() if left and scaler._scale is not None else None
        with self._explained("update", None):
            yield
        known.generation += 1
        known.stepped_before, known.stepped = known.stepped, {}
        if known.skipped >= MANY_SKIPS:
            self._judge_history(scaler, known)

    def _load(self, scaler: Any, *args: Any, **kw: Any) -> Running:
        yield
        self._ledger.scaler(scaler).loaded = True

    def judge_scale(self, scaler: Any, scale: float) -> None:
        """Judge a scale where steps are skipped on the device, as fused optimizers do."""
        known = self._ledger.scaler(scaler)
        if known.skipped < MANY_SKIPS and scale < 1:
            self._judge_history(scaler, known)

    def _judge_history(self, scaler: Any, known: Scaler) -> None:
        scale = scale_of(scaler)
        bad = known.bad_losses >= MANY_SKIPS - 1
        if bad or scale < 1:
            self._recorder.look_soon = True
            finite = False if bad else None
            self._recorder.emit(
                ScaleHistory(source=known.scaled_at, scale=scale, skipped=known.skipped, loss_finite=finite)
            )

    @contextmanager
    def _explained(self, method: str, optimizer: Optimizer | None) -> Iterator[None]:
        """Within the block a method of the scaler runs; where it raises, say why before it does."""
        try:
            yield
        except (RuntimeError, ValueError, AssertionError) as error:
            weights = [p for group in optimizer.param_groups for p in group["params"]] if optimizer else []
            self._recorder.emit(
                ScalerRefused(
                    source=user_line(),
                    method=method,
                    error=str(error),
                    half_weights=sum(weight.dtype == torch.float16 for weight in weights),
                    weights=len(weights),
                )
            )
            raise


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """The tensors in nested lists and tuples; an iterator is left alone, as it can be read once only."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, list | tuple):
        for output in outputs:
            yield from _tensors(output)
