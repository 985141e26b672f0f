"""Losses at the root of backward passes: how many feed a step, how they were reduced, in which type, and how
far half-precision sums of their gradients are off."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tilefit.precision.graph import Kind
from tilefit.precision.ledger import Begins, Pass, Stepped, Tracker
from tilefit.precision.lines import user_line
from tilefit.precision.look import Observer
from tilefit.precision.rules.autocast import LossInHalfPrecision
from tilefit.precision.rules.storage import AccumulationNotAveraged, LowPrecisionGradientSum
from tilefit.precision.tensors import HALF, Notes, is_plain, name_of, spread

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
        passes.append(Pass(source, chain.factor if chain.mean else None))
        if len(passes) > 1:
            self._recorder.facts.add("accumulation")
        if chain.half is None:
            return
        operation, dtype, number = chain.half
        line = "" if self._ledger.look is None else self._ledger.look.line_of(number)
        event = LossInHalfPrecision(
            source=line or source,
            operation=operation.removesuffix("0").removesuffix("Backward"),
            dtype=name_of(dtype),
            autocast="autocast" in self._recorder.facts,
            scale=self._ledger.scale_of(chain.marks) if chain.marks else None,
        )
        if line:
            self._pending = None
            self._recorder.emit(event)
        elif self._pending is None:
            # A later step may know the line of the loss; until then this is all there is.
            self._pending = event

    def on_stepped(self, stepped: Stepped) -> None:
        """They have fed a step."""
        cycle, name = self._ledger.here.cycle, type(stepped.optimizer).__name__
        passes, multiplied = cycle.passes, set(cycle.multiplied.values()) or {1.0}
        if not self._recorder.looking or len(passes) < 2 or len(set(passes)) != 1:
            return
        source, factor = passes[0]
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
        handle: RemovableHandle = node.register_prehook(partial(self._adds, weakref.ref(node.variable)))
        return handle

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
        tiny = torch.finfo(torch.float32).tiny
        known = [
            (target, wide) for reference, wide in self._sums.values() if (target := reference()) is not None
        ]
        errors = (
            (spread(target).float() - wide).norm() / wide.norm().clamp_min(tiny) for target, wide in known
        )
        return max(map(float, errors), default=None)

    def end(self) -> None:
        self._sums.clear()
