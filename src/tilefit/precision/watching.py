"""Watching a training loop."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tilefit.emulation.device import Device
from tilefit.emulation.tensor import CudaTensor
from tilefit.errors import UsageError
from tilefit.precision import graph
from tilefit.precision.autocast import LostGradients, Products, Regions, is_compiled
from tilefit.precision.gradients import WIDTH, WITNESSES, Gradient
from tilefit.precision.ledger import Begins, Ended, Ledger, Running, Stepped, Tracker
from tilefit.precision.look import Look, Observer, Observers, Statistics
from tilefit.precision.numerics import Exponents, Origin, Shadows, is_finite
from tilefit.precision.patches import Patches
from tilefit.precision.ranks import Ranks
from tilefit.precision.recorder import Recorder
from tilefit.precision.rules import all_rules
from tilefit.precision.rules.base import figure
from tilefit.precision.scalers import Checkpoints, Scalers, Schedules
from tilefit.precision.storage import Accumulators, Losses, Weights
from tilefit.precision.tensors import has_values, name_of, sampled, stands_for_another
from tilefit.precision.window import Window
from tilefit.report.watched import CANNOT, CHECKED, INAPPLICABLE, Check, Watched
from tilefit.rules.finding import Alarm
from tilefit.rules.registry import choose

#: The first steps are looked at closely, then one in so many.
FIRST_STEPS = 4
EVERY = 100
#: The rules that a close look is for.
CLOSELY = tuple(rule.code for rule in all_rules() if rule.closely)
#: The rules that need numbers.
VALUES = tuple(rule.code for rule in all_rules() if rule.values)
#: What stands in the way of close looks, for the report.
NUMERICS_OFF = "close looks are switched off"
COMPILED = "a compiled graph shows none of its operations"
OWN_MODE = "a dispatch mode of your own is active"
TOO_SHORT = "no step was looked at closely: the run was too short"

_T = TypeVar("_T")
#: Events reach them in this order: what one leaves for another comes first.
_TRACKERS: tuple[type[Tracker], ...] = (
    *(Scalers, Checkpoints, Regions, Schedules, Window, Losses, Exponents, Weights, Shadows, Ranks),
    *(Accumulators, Products, LostGradients),
)

_active: Watch | None = None


class Watch:
    """Watches mixed-precision training, without changing it.

    Between :meth:`start` and :meth:`stop` every step's bookkeeping is followed: which loss scale each
    gradient carries, which autocast regions are open. The first four steps, and one in ``every`` after that,
    are looked at closely: every operation passes by, and risky ones are repeated in fp32 on samples.

    Args:
        model: The model, or several; found by itself where it is not given, but then without parameter names
            until it has run.
        optimizer: The optimizer, or several. One made later, or not named, is found when it clears gradients
            or steps.
        scaler: The gradient scaler, or None. Named to learn that it is switched off; those in use are found.
        every: A close look at one step in this many, after the first four.
        numerics: Look closely at all; False leaves the bookkeeping alone.
        steps: Stop by itself after this many steps; None for never.
        find_non_finite: Check every operation of every step for inf and NaN, which is slow. Without it that
            is done once a loss is not finite, when the weights may be beyond help.
        select, ignore: Codes of rules, or their beginnings, as for ``tilefit check``.

    Raises:
        UsageError: a number is out of range, or a code fits no rule.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module] | None = None,
        *,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        scaler: Any = None,
        every: int = EVERY,
        numerics: bool = True,
        steps: int | None = None,
        find_non_finite: bool = False,
        select: Sequence[str] = (),
        ignore: Sequence[str] = (),
    ) -> None:
        for name, value in (("every", every), ("steps", steps)):
            if value is not None and value < 1:
                raise UsageError(f"{name}={value} is not a number of steps", hint="Use 1 or more.")
        self._models = [model] if isinstance(model, nn.Module) else list(model or ())
        self._optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
        self._given_scaler, self._every, self._last = scaler, every, steps
        self._numerics, self._find_non_finite = numerics, find_non_finite
        self._look: Look | None = None
        self._looks = 0
        self._origin: Origin | None = None
        self._losses_finite: list[Tensor] = []
        self._weights: list[tuple[float, ...]] = []
        self._primary: weakref.ref[Optimizer] | None = None
        #: The step of the backward pass that runs, which ends with it.
        self._stepped_within: Stepped | None = None
        self._seek_origin = self._ended = self._compiled_seen = False
        self._frames_before = 0
        self._stepped: dict[str, None] = {}
        #: Called when the steps asked for have ended, and again where the loop goes on all the same.
        self.on_end: Callable[[], None] = lambda: None
        self._patches = Patches()
        self._recorder = recorder = Recorder(choose(all_rules(), select, ignore))
        self._ledger = ledger = Ledger(recorder)
        self._trackers = {kind: kind(recorder, ledger) for kind in _TRACKERS}
        self._exponents = self._the(Exponents)
        self._numerical = [tracker for tracker in self._trackers.values() if isinstance(tracker, Observer)]
        self._statistics = Statistics()
        self._observers = Observers(self._statistics, self._numerical)
        recorder.on(Begins, self._on_backward)
        recorder.on(Ended, self._on_backward_ended)
        recorder.on(Stepped, self._on_stepped)

    def _the(self, kind: type[_T]) -> _T:
        return self._trackers[kind]  # type: ignore[index,return-value]

    # ---- life ------------------------------------------------------------------------------

    def start(self) -> Self:
        """Begin to watch.

        Raises:
            UsageError: a watch is running already.
        """
        global _active
        if _active is not None:
            raise UsageError("another watch is running", hint="Leave it first: one at a time.")
        if not self._patches.active:
            raise UsageError("this watch has ended", hint="Make a new one.")
        _active = self
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> None:
        self._frames_before = _frames_compiled()
        if any(isinstance(mode, Device) for mode in _get_current_dispatch_mode_stack()):
            self._recorder.cannot_check("values, of which the emulated GPU has none", *VALUES)
        for model in self._models:
            self._recorder.name(model)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    self._ledger.follow(parameter)
            if self._numerics:
                self._the(Shadows).met(model)
        for optimizer in self._optimizers:
            self._ledger.adopt(optimizer)
        if self._given_scaler is not None and not self._given_scaler.is_enabled():
            self._recorder.cannot_check("the gradient scaler: it is switched off")
        tables = [self._ledger.patches(), *(tracker.patches() for tracker in self._trackers.values())]
        self._patches.apply(*chain(*tables))
        # Not is_available(), which fixes the visible devices before the script can choose them.
        if torch.version.cuda is not None:
            self._patches.apply((torch.cuda.CUDAGraph, "replay", self._replay))
        if self._find_non_finite and self._numerics:
            # The first step is the likeliest; whether a scale is at work is not known yet.
            self._begin_look(scaled=self._given_scaler is not None)

    def stop(self) -> None:
        """End: everything is put back as it was. Does nothing where the watch has ended."""
        global _active
        if _active is not self:
            return
        _active = None
        self._finish_look()
        if self._look is not None:
            self._recorder.cannot_check("the last step: a dispatch mode of your own was open at its end")
        for tracker in self._trackers.values():
            tracker.finish()
        self._ledger.stop()
        self._patches.undo()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *raised: object) -> None:
        self.stop()

    # ---- results ---------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Steps that have ended."""
        return self._recorder.step

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """What was found so far, the most severe first."""
        return self._recorder.alarms

    def report(self, title: str = "") -> Watched:
        """The report of the run so far.

        Args:
            title: What was watched; by default the model's class.
        """
        recorder, names = self._recorder, [type(model).__name__ for model in self._models]
        trained = sorted(map(name_of, self._the(Regions).trained))
        autocast = f"autocast {'/'.join(trained)}" if trained else "no autocast seen"
        scale = "no loss scale"
        if recorder.first_scale is not None and recorder.scale is not None:
            # An alarm names that of its own step.
            ends = dict.fromkeys(map(figure, (recorder.first_scale, recorder.scale)))
            scale = f"loss scale {' to '.join(ends)}"
        tables = tuple(table for table in (*self._exponents.tables(), self._statistics.table()) if table.rows)
        unchecked = [
            f"{', '.join(codes)}: {why}" if codes else why for why, codes in recorder.unchecked.items()
        ]
        what = {"tables": tables, "unchecked": tuple(unchecked), "checks": tuple(self._checks())}
        title = title or ", ".join(names) or "training"
        return recorder.report(title, setup=(autocast, scale, *self._stepped), steps=self.steps, **what)

    def _checks(self) -> Iterator[Check]:
        """What each rule could look at, and what not and why."""
        for rule in self._recorder.rules.values():
            missing = [need for need in rule.needs if need not in self._recorder.facts]
            unchecked = self._recorder.unchecked.items()
            blocked = [what for what, codes in unchecked if rule.code.startswith(codes or "-")]
            status, why = CHECKED, f"not: {rule.limit}" if rule.limit else ""
            if rule.replay:
                status, why = INAPPLICABLE, f"tilefit.precision.{rule.replay} checks it"
            elif missing:
                status, why = INAPPLICABLE, f"the run had no {missing[0]}"
            elif blocked:
                status, why = CANNOT, blocked[0]
            elif rule.closely and not self._looks:
                status, why = CANNOT, TOO_SHORT if self._numerics else NUMERICS_OFF
            yield Check(rule.code, status, why)

    # ---- steps -----------------------------------------------------------------------------

    def _on_backward_ended(self, ended: Ended) -> None:
        self._end_if_due()
        if not self._ledger.here.of and self._have_moved():
            self._end_step(bool(self._ledger.scalers), self._ledger.gradients)
        elif self._stepped_within is not None:
            stepped, self._stepped_within = self._stepped_within, None
            self._on_stepped(stepped)

    def _end_if_due(self) -> None:
        if self._ended:
            try:
                self.on_end()
            finally:
                self._finish_look()
            self.stop()

    def _on_backward(self, begins: Begins) -> None:
        self._end_if_due()
        if not self._recorder.looking:
            return
        scan = begins.here.scan
        self._compiled_seen |= scan.compiled
        if scan.nodes.total() >= graph.MOST:
            what = f"operations of a backward pass beyond the first {graph.MOST} nodes of its graph"
            self._recorder.cannot_check(what)
        for root in begins.roots:
            if isinstance(root, Tensor) and not (stands_for_another(root) or isinstance(root, CudaTensor)):
                self._losses_finite.append(torch.isfinite(root.detach()).all())

    def _have_moved(self) -> bool:
        """Whether weights have moved since the last backward pass, without an optimizer."""
        weights, before = self._ledger.parameters[:WITNESSES], self._weights
        values = [sampled(w.detach(), WIDTH).tolist() if has_values(w) else () for w in weights]
        self._weights = [(w._version, *seen) for w, seen in zip(weights, values, strict=True)]
        return len(before) == len(weights) and before != self._weights

    def _on_stepped(self, stepped: Stepped) -> None:
        if self._ended:
            self._end_if_due()
            return
        self._stepped[type(stepped.optimizer).__name__] = None
        primary = self._primary() if self._primary is not None else None
        if primary is None:
            self._primary = weakref.ref(stepped.optimizer)
        elif primary is not stepped.optimizer:
            return
        if self._ledger.here.depth:
            self._stepped_within = stepped  # no look begins or ends within a backward pass
            return
        self._the(Ranks).compare(stepped, self._models, due=self._is_due())
        self._end_step(stepped.scaler is not None, self._ledger.present(stepped.optimizer))

    def _end_step(self, scaled: bool, used: Iterable[Gradient]) -> None:
        recorder = self._recorder
        self._judge_finiteness(scaled, used)
        self._finish_look()
        recorder.step += 1
        if self._last is not None and recorder.step >= self._last:
            # Not here: an optimizer may be going through its hooks. The next backward pass ends it.
            self._ended = True
            recorder.looking = False
            self.on_end()
            return
        recorder.looking = self._is_due() or recorder.look_soon
        recorder.look_soon = False
        if recorder.looking and self._numerics:
            self._begin_look(scaled)

    def _judge_finiteness(self, scaled: bool, used: Iterable[Gradient]) -> None:
        # Under a scale an overflow is normal once; the scaler's history says when it is not.
        collapsed = any(known.bad_losses >= 2 for _, known in self._ledger.scalers)
        if not all(map(bool, self._losses_finite)):
            self._seek_origin |= collapsed if scaled else True
            self._recorder.look_soon |= self._seek_origin
        self._losses_finite.clear()
        if self._origin is not None and not self._origin.armed:
            values = [gradient.value for gradient in used]
            spoilt = not scaled and not all(is_finite(value) for value in values if value is not None)
            self._origin.armed = self._seek_origin or collapsed or spoilt

    def _is_due(self) -> bool:
        """Whether this step is looked at closely on every rank."""
        step = self._recorder.step
        return step < FIRST_STEPS or step % self._every == 0 or self._find_non_finite

    def _begin_look(self, scaled: bool) -> None:
        if self._look is not None:
            return
        if (compiled := self._compiled()) or not Look.possible():
            why = COMPILED if compiled else OWN_MODE
            self._recorder.cannot_check(f"numerics and writes to gradients: {why}", *CLOSELY)
            return
        observers, self._origin = self._observers, None
        if self._seek_origin or self._find_non_finite:
            weights, armed = self._ledger.parameters, self._seek_origin
            self._origin = Origin(self._recorder, weights, backward=not scaled, armed=armed)
            observers = Observers(self._statistics, [*self._numerical, self._origin])
        thorough, self._seek_origin = self._origin is not None, False
        self._look = Look(self._recorder, self._ledger, observers, thorough=thorough)
        self._look.begin()
        self._looks += 1

    def _finish_look(self) -> None:
        if self._look is not None and self._look.finish():
            self._look = None

    def _compiled(self) -> bool:
        """Whether torch.compile is at work: a frame compiled under a dispatch mode would run uncompiled."""
        if any(is_compiled(module) for model in self._models for module in model.modules()):
            return True
        return self._compiled_seen or _frames_compiled() != self._frames_before

    def _replay(self, captured: Any, *args: Any, **kw: Any) -> Running:
        self._recorder.cannot_check("what runs inside CUDA graphs")
        yield
        self._ledger.replay_ran()


def _frames_compiled() -> int:
    """How many frames torch.compile has looked at in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else sum(dynamo.counters["frames"].values())


#: ``with watch(model, optimizer=optimizer) as w:`` reads better than the class's name.
watch = Watch
