"""Chooses fixes by what they are worth, proves them, applies them."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any, Unpack

import torch
from torch import nn

from tilefit import units
from tilefit.capture.failures import ON_CPU
from tilefit.cost import StepEstimate, estimate_step
from tilefit.cost.estimate import ESTIMATED, MEASURED
from tilefit.cost.fusion import fuse
from tilefit.cost.priced import PricedGpu, resolve
from tilefit.errors import CaptureError, UsageError
from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal, RefusedError
from tilefit.fixes.measuring import Gain, require_cuda, step_times_s
from tilefit.fixes.optimizer import is_fused, like
from tilefit.fixes.plan import AppliedFix, Plan, RefusedFix
from tilefit.fixes.proof import prove, prove_in_place
from tilefit.fixes.registry import select as select_fixes
from tilefit.fixes.run import Run
from tilefit.fixes.together import Together
from tilefit.fixes.verification import Verification, join
from tilefit.gpus import Gpu
from tilefit.ops import Step
from tilefit.options import OptimizerName, Selection, SelectionKeywords, StepKeywords, StepOptions, taken
from tilefit.rules.base import Change
from tilefit.rules.engine import gain
from tilefit.rules.finding import SAFE, UNSAFE

LEVELS = (SAFE, UNSAFE)


class OptimizeKeywords(StepKeywords, SelectionKeywords, total=False):
    """The keywords of :func:`optimize` beyond its own."""

    optimizer: OptimizerName | torch.optim.Optimizer  # type: ignore[misc]


#: Smallest gain worth a change, as a share of the step: below, the prediction is noise.
MIN_GAIN = 0.01


def optimize(
    model: nn.Module,
    inputs: Any = None,
    *,
    gpu: str | Gpu | None = None,
    level: str = SAFE,
    budget: float | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    verify: bool = True,
    measure: bool = False,
    inplace: bool = True,
    **keywords: Unpack[OptimizeKeywords],
) -> Plan:
    """Change a model so that its step runs faster and computes the same, and prove that it does.

    Fixes are chosen by predicted gain, each priced by capturing the changed model again on top of those
    before it; one that cannot be proven the same function is left out, with the reason. Parameters keep their
    names, shapes and values, so that checkpoints and optimizers fit as before. No GPU is needed.

    Args:
        model: A module; it is changed in place, which :meth:`Plan.undo` takes back.
        inputs, gpu, loss: As for :func:`tilefit.check`; one GPU.
        level: ``"safe"``: fixes that keep the function; ``"unsafe"``: also those that may change training.
        budget: Seconds after which no further fix is looked for; None for no limit.
        verify: Prove every fix.
        measure: Measure the step with and without the fixes, in turn, on the CUDA GPU that the model and the
            inputs are on; a fix that makes it slower is taken back: ``plan.refused`` says by how much.
        inplace: Change ``model`` itself; otherwise a deep copy.
        keywords: How the step runs, as for :func:`tilefit.check`, and which fixes are wanted. ``optimizer``
            may also be the optimizer itself, whose options count. ``select`` and ``ignore``: names of fixes
            (``pad-linear``), or codes of rules or their beginnings (``ALN``). ``min_gain``: smallest gain
            worth a change, as a share of the step as it then is; below zero every fix that can be made is,
            whether it pays or not.

    Raises:
        TilefitError: An option is not understood, or the step cannot be captured; says what to do.
    """
    gpus = resolve(gpu)
    if len(gpus) != 1:
        raise UsageError("a plan is made for one GPU", hint='Name one: gpu="h200".')
    live = keywords.get("optimizer")
    if isinstance(live, torch.optim.Optimizer):
        of_live = {"optimizer": like(live, model), "fused_optimizer": is_fused(live)}
        options, selection = taken("optimize", {**keywords, **of_live}, StepOptions, Selection)
    else:
        options, selection = taken("optimize", keywords, StepOptions, Selection)
    run = Run(
        model=model if inplace else copy.deepcopy(model),
        inputs=inputs,
        options=options,
        loss=loss,
        live_optimizer=live if isinstance(live, torch.optim.Optimizer) else None,
    )
    return make_plan(run, gpus[0], selection, level=level, verify=verify, measure=measure, budget=budget)


def make_plan(
    run: Run,
    gpu: PricedGpu,
    selection: Selection,
    *,
    level: str = SAFE,
    verify: bool = True,
    measure: bool = False,
    budget: float | None = None,
) -> Plan:
    """What :func:`optimize` does to a model that is to be changed in place; arguments and errors as there."""
    if level not in LEVELS:
        raise UsageError(f"unknown level {level!r}", hint=f"Use one of: {', '.join(LEVELS)}.")
    _refuse_unchangeable(run.model)
    min_gain = MIN_GAIN if selection.min_gain is None else selection.min_gain
    chosen = select_fixes(selection.select, selection.ignore)
    fixes = [fix for fix in chosen if level == UNSAFE or fix.level == SAFE]
    deadline_s = time.monotonic() + budget if budget is not None else float("inf")
    if measure:
        require_cuda(run)
    try:
        planner = _Planner(run, gpu, fixes, min_gain, verify)
    except CaptureError as error:
        if run.live_optimizer is not None:
            _blame(run.live_optimizer, run, error)
        if error.hint == ON_CPU:
            error.hint = "Fixes are chosen on shapes alone; tilefit check --on-cpu still shows the findings."
        raise
    try:
        while time.monotonic() < deadline_s and planner.improve():
            pass
        if measure:
            planner.measure()
    except BaseException:
        planner.take_back()
        raise
    return planner.plan()


def _refuse_unchangeable(model: object) -> None:
    """Refuse what is no model that fixes can change.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"a {type(model).__name__} cannot be optimized", hint="Pass a torch.nn.Module.")
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError("the model was scripted or traced, and cannot be changed", hint="Optimize it first.")
    if hasattr(model, "_orig_mod"):
        raise UsageError(
            "the model is compiled already",
            hint="Give it as it was before, with compile=True (--compile), and compile plan.model.",
        )


def _blame(optimizer: torch.optim.Optimizer, run: Run, error: CaptureError) -> None:
    """Say that the optimizer is what keeps the step from being captured.

    Raises:
        UsageError: it is.
        CaptureError: the step cannot be captured without it either.
    """
    trial = run.on_meta()
    trial.change(optimizer="none")
    trial.capture()
    raise UsageError(
        f"the step of {type(optimizer).__name__} cannot be captured: {error.what}",
        hint='Leave it out: optimizer="none".',
    ) from error


def _gains(times_s: Sequence[Sequence[float]]) -> list[Gain]:
    return [Gain.between(before, after) for before, after in pairwise(times_s)]


@dataclass(frozen=True, slots=True)
class _Priced:
    """A run with its price.

    Attributes:
        written: The step as the model is written, in which fixes look for what they can change.
        step: The step as it runs: what the compiler makes of it, where it is compiled.
    """

    run: Run
    written: Step
    step: Step
    estimate: StepEstimate


_Key = tuple[str, ChangeSet]


class _Planner:
    """The search: greedy, and lazy in that a candidate is priced again only when it could be the best.

    What a candidate saved on top of fewer fixes is taken for what it will save on top of more, until nothing
    else is left.
    """

    def __init__(self, run: Run, gpu: PricedGpu, fixes: Sequence[Fix], min_gain: float, verify: bool) -> None:
        self.run = run
        self.gpu = gpu
        self.fixes = fixes
        self.min_gain = min_gain
        self.verify = verify
        self.first = self.now = self._priced(run.on_meta())
        self.applied: list[AppliedFix] = []
        self.refused: dict[RefusedFix, None] = {}
        self.candidates: list[ChangeSet] = []
        self.unpriced: set[ChangeSet] = set()
        #: Host time of Python that some fixes run in place of launches.
        self.unpriced_s = 0.0
        self.edits = Edits()
        self.before_s = self.after_s = self.first.estimate.time_s
        self.provenance = ESTIMATED
        self._gains: dict[_Key, float] = {}
        self._unfit: set[_Key] = set()

    def improve(self) -> bool:
        """Apply the best fix that is left; False where none is worth it."""
        return any(
            self._best_applied([fix for fix in self.fixes if fix.is_priced and fix.is_last == last])
            for last in (False, True)
        )

    def _best_applied(self, fixes: Sequence[Fix]) -> bool:
        """Apply the best of some fixes; False where none is worth it."""
        waiting = self._candidates(fixes)
        priced: dict[_Key, _Priced] = {}
        while waiting:
            fix, candidate = waiting.pop(0)
            key = (fix.name, candidate)
            if key not in priced:
                after = self._tried(fix, candidate)
                if after is None:
                    continue
                priced[key] = after
                self._gains[key] = self._gain(fix, candidate, after)[0]
                waiting[:0] = self._called_for(fix, candidate, after)
                if waiting and self._gains[key] < self._known_gain_s(waiting[0]):
                    waiting.append((fix, candidate))
                    waiting.sort(key=self._known_gain_s, reverse=True)
                    continue
            if self._is_worth(fix, candidate, priced[key]) and self._apply(fix, candidate, priced[key]):
                self.unpriced_s -= self._unpriced_gain_s(fix, candidate, priced[key])
                self.now = priced[key]
                self.after_s = self.now.estimate.time_s + self.unpriced_s
                return True
        return False

    def _is_worth(self, fix: Fix, candidate: ChangeSet, after: _Priced) -> bool:
        """Above what counts as a change, and a gain nine times in ten."""
        gain_s, low_s, _ = self._gain(fix, candidate, after)
        return gain_s >= self.min_gain * self.now.estimate.time_s and (low_s > 0 or self.min_gain < 0)

    def _gain(self, fix: Fix, candidate: ChangeSet, after: _Priced) -> tuple[float, float, float]:
        """What a candidate saves, with the bounds of it."""
        gain_s, low_s, high_s = gain(self.now.estimate, after.estimate, Change(step=after.step))
        more_s = self._unpriced_gain_s(fix, candidate, after)
        return gain_s + more_s, low_s + more_s, high_s + more_s

    def _unpriced_gain_s(self, fix: Fix, candidate: ChangeSet, after: _Priced) -> float:
        """What a candidate saves of the host time that prices leave out: less than nothing where it adds as
        much to it as it saves of launches."""
        if fix.is_last:
            return self.unpriced_s  # neither the compiler nor a graph runs that Python
        if candidate.saves_launches:
            return 0.0
        now, then = self.now.estimate, after.estimate
        return min(0.0, (now.gpu_time_s - then.gpu_time_s) - (now.time_s - then.time_s))

    def _known_gain_s(self, entry: tuple[Fix, ChangeSet]) -> float:
        fix, candidate = entry
        return self._gains.get((fix.name, candidate), float("inf"))

    def _candidates(self, fixes: Sequence[Fix]) -> list[tuple[Fix, ChangeSet]]:
        context = self._context(self.now)
        changed = {path for fix in self.applied for path in fix.modules}
        found = []
        for fix in fixes:
            for candidate in fix.find(context):
                if isinstance(candidate, Refusal):
                    # What another fix has changed is not refused.
                    if not changed.intersection(candidate.modules):
                        self._refuse(fix, candidate.modules, candidate.reason)
                elif (fix.name, candidate) not in self._unfit:
                    found.append((fix, candidate))
        return sorted(found, key=self._known_gain_s, reverse=True)

    def _called_for(self, fix: Fix, candidate: ChangeSet, after: _Priced) -> list[tuple[Fix, ChangeSet]]:
        """A way to run the whole program once more, with the changes of the model that only it calls for: it
        is not to be judged without them."""
        if not fix.is_last or isinstance(candidate, Together):
            return []
        context = self._context(after)
        first = tuple(
            found
            for other in self.fixes
            if other.is_priced and not other.is_last
            for found in other.find(context)
            # What the model calls for as it is run now was priced before.
            if isinstance(found, ChangeSet) and (other.name, found) not in self._gains.keys() | self._unfit
        )
        together = Together.of(first, candidate)
        return [(fix, together)] if first and (fix.name, together) not in self._unfit else []

    def _tried(self, fix: Fix, candidate: ChangeSet) -> _Priced | None:
        """The run with the candidate on top; None where that cannot be."""
        run = self.now.run.on_meta()
        try:
            candidate.apply(run)
            return self._priced(run)
        except (RefusedError, CaptureError) as error:
            self._reject(fix, candidate, error.what)
            return None

    def _priced(self, run: Run) -> _Priced:
        written = run.capture()
        step = fuse(written) if run.options.compile else written
        return _Priced(run, written, step, estimate_step(step, self.gpu))

    def _context(self, priced: _Priced) -> Context:
        """What fixes look at."""
        is_written = priced.step is priced.written
        estimate = priced.estimate if is_written else estimate_step(priced.written, self.gpu)
        return Context(priced.written, self.gpu, estimate, priced.run)

    def _apply(self, fix: Fix, candidate: ChangeSet, after: _Priced) -> bool:
        proofs: list[Verification] = []
        try:
            for proof in self._proofs(candidate):
                if not proof.ok:
                    self._reject(fix, candidate, f"not proven the same: {proof}")
                    return False
                proofs.append(proof)
            candidate.apply(self.run, self.edits)
        except RefusedError as refused:
            self._reject(fix, candidate, refused.what)
            return False
        self._add(fix, candidate, self._gain(fix, candidate, after), proofs)
        return True

    def _add(
        self,
        fix: Fix,
        candidate: ChangeSet,
        predicted_s: tuple[float, float, float],
        proofs: Sequence[Verification],
    ) -> None:
        gain_s, low_s, high_s = predicted_s
        in_fp64, on_gpu = (*proofs, None, None)[:2]
        self.candidates.append(candidate)
        self.applied.append(
            AppliedFix(
                name=fix.name,
                level=fix.level,
                rules=fix.rules,
                modules=candidate.modules,
                summary=candidate.summary,
                gain_s=gain_s,
                gain_low_s=low_s,
                gain_high_s=high_s,
                verification=in_fp64,
                on_gpu=on_gpu,
            )
        )

    def _proofs(self, candidate: ChangeSet) -> Iterator[Verification]:
        """In fp64 on the CPU; and where the model is on a GPU, there."""
        if self.verify and candidate.modules:
            # How the program is run is no part of the proof.
            changes = candidate.first if isinstance(candidate, Together) else (candidate,)
            yield join([prove(self.run, each) for each in changes])
            if all(parameter.is_cuda for parameter in self.run.model.parameters()):
                yield join([prove_in_place(self.run, each) for each in changes])

    def _reject(self, fix: Fix, candidate: ChangeSet, reason: str) -> None:
        self._unfit.add((fix.name, candidate))
        self._refuse(fix, candidate.modules, reason)

    def _refuse(self, fix: Fix, modules: tuple[str, ...], reason: str) -> None:
        self.refused.setdefault(RefusedFix(fix.name, modules, reason))

    def measure(self) -> None:
        """Measure what the fixes gain; take back those that make the step slower, and all that make up a plan
        that is no gain."""
        context = self._context(self.now)
        for fix in self.fixes:
            for candidate in () if fix.is_priced else fix.find(context):
                if isinstance(candidate, ChangeSet):
                    self._add(fix, candidate, (0.0, 0.0, 0.0), ())
                    self.unpriced.add(candidate)
        times_s = self._measured()
        while losses := self._losses(times_s):
            for index, gain_s in reversed(losses):
                self.candidates.pop(index)
                lost = self.applied.pop(index)
                longer = f"a step takes {units.seconds(-gain_s)} longer with it"
                reason = (
                    f"measured on this GPU, {longer if gain_s < 0 else 'it saves no more than the noise'}"
                )
                self.refused.setdefault(RefusedFix(lost.name, lost.modules, reason))
            self.now = self._with_what_is_left()
            times_s = self._measured()
        self.before_s = statistics.median(times_s[0])
        self.after_s = self.before_s - Gain.between(times_s[0], times_s[-1]).time_s
        self.provenance = MEASURED
        self.applied = [
            replace(fix, measured_s=gain.time_s)
            for fix, gain in zip(self.applied, _gains(times_s), strict=True)
        ]
        for candidate in self.candidates:
            candidate.apply(self.run, self.edits)

    def _losses(self, times_s: Sequence[Sequence[float]]) -> list[tuple[int, float]]:
        """Indices of fixes that do not stay, with what each gains."""
        gains = _gains(times_s)
        losses = [
            (index, gain.time_s)
            for index, (candidate, gain) in enumerate(zip(self.candidates, gains, strict=True))
            if gain.high_s < 0 or (candidate in self.unpriced and gain.low_s <= 0)
        ]
        if not losses and Gain.between(times_s[0], times_s[-1]).time_s < 0:
            # No single one for sure, all together none the less.
            losses = [min(enumerate(gain.time_s for gain in gains), key=itemgetter(1))]
        return losses

    def _with_what_is_left(self) -> _Priced:
        """The model as it was passed in with the candidates that are left, of which some have no price; what
        needs one that was taken back goes too."""
        run = self.first.run.on_meta()
        for candidate in list(self.candidates):
            if candidate in self.unpriced:
                continue
            try:
                candidate.apply(run)
            except RefusedError as error:
                index = self.candidates.index(candidate)
                self.candidates.pop(index)
                lost = self.applied.pop(index)
                reason = f"it goes with a fix that was taken back ({error})"
                self.refused.setdefault(RefusedFix(lost.name, lost.modules, reason))
        return self._priced(run)

    def _measured(self) -> list[list[float]]:
        self.take_back()
        return step_times_s(self.run, self.candidates)

    def take_back(self) -> None:
        """Undo what was applied."""
        self.edits.undo()

    def _outdone(self) -> set[str]:
        """Names of the fixes that run the whole program in another way, where one of them was applied."""
        whole = {fix.name for fix in self.fixes if fix.is_last}
        return whole if whole.intersection(fix.name for fix in self.applied) else set()

    def plan(self) -> Plan:
        return Plan(
            model=self.run.model,
            run=self.run,
            gpu=self.gpu.name,
            fixes=tuple(self.applied),
            refused=tuple(each for each in self.refused if each.name not in self._outdone()),
            before_s=self.before_s,
            after_s=self.after_s,
            before_bytes=self.first.step.memory.peak_bytes,
            after_bytes=self.now.step.memory.peak_bytes,
            provenance=self.provenance,
            candidates=tuple(self.candidates),
            edits=self.edits,
        )
