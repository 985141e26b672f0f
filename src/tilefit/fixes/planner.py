"""Chooses fixes by what they are worth, proves them, applies them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tilefit.checker import resolve
from tilefit.cost import StepEstimate, estimate_step
from tilefit.cost.estimate import ESTIMATED, MEASURED
from tilefit.cost.fusion import fuse
from tilefit.errors import CaptureError, UsageError
from tilefit.fixes.fix import Candidate, Context, Fix, Refusal, RefusedError, Undo
from tilefit.fixes.measuring import require_cuda, step_times_s
from tilefit.fixes.plan import AppliedFix, Plan, RefusedFix
from tilefit.fixes.proof import prove, prove_in_place
from tilefit.fixes.registry import select as select_fixes
from tilefit.fixes.run import Run
from tilefit.fixes.verification import Verification
from tilefit.gpus import Gpu
from tilefit.ops import Step
from tilefit.rules.base import Change
from tilefit.rules.engine import gain
from tilefit.rules.finding import SAFE, UNSAFE

LEVELS = (SAFE, UNSAFE)
#: Smallest gain worth a change, as a share of the step: below, the prediction is noise.
MIN_GAIN = 0.01
#: A measured loss below this share of the step is none: so much differ the medians of equal steps.
_NOISE = 0.005


def optimize(
    model: nn.Module,
    inputs: Any = None,
    *,
    gpu: str | Gpu | None = None,
    level: str = SAFE,
    budget: float | None = None,
    train: bool = True,
    amp: str = "",
    tf32: bool | None = None,
    optimizer: str | torch.optim.Optimizer = "adamw",
    fused_optimizer: bool = False,
    channels_last: bool = False,
    compile: bool = False,
    loss: Callable[[Any], torch.Tensor] | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    min_gain: float = MIN_GAIN,
    verify: bool = True,
    measure: bool = False,
    inplace: bool = True,
) -> Plan:
    """Change a model so that its step runs faster and computes the same, and prove that it does.

    Fixes are chosen by predicted gain, each priced by capturing the changed model again on top of those
    before it; one that cannot be proven the same function is left out, with the reason. Parameters keep their
    names, shapes and values, so that checkpoints and optimizers fit as before. No GPU is needed.

    Args:
        model: A module; it is changed in place, which :meth:`Plan.undo` takes back.
        inputs, gpu, train, amp, tf32, fused_optimizer, channels_last, compile, loss: As for
            :func:`tilefit.check`; one GPU.
        level: ``"safe"``: fixes that keep the function; ``"unsafe"``: also those that may change training.
        budget: Seconds after which no further fix is looked for; None for no limit.
        optimizer: ``"adamw"``, ``"sgd"`` or ``"none"``; or the optimizer itself.
        select, ignore: Names of fixes (``pad-linear``), or codes of rules or their beginnings (``ALN``).
        min_gain: Smallest gain worth a change, as a share of the step; below zero every fix that can be made
            is, whether it pays or not.
        verify: Prove every fix.
        measure: Measure the step with and without the fixes, in turn, on the CUDA GPU that the model and the
            inputs are on; what turns out to be no gain is taken back.
        inplace: Change ``model`` itself; otherwise a deep copy.

    Raises:
        TilefitError: An option is not understood, or the step cannot be captured; says what to do.
    """
    if level not in LEVELS:
        raise UsageError(f"unknown level {level!r}", hint=f"Use one of: {', '.join(LEVELS)}.")
    if not isinstance(model, nn.Module):
        raise UsageError(f"a {type(model).__name__} cannot be optimized", hint="Pass a torch.nn.Module.")
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError("the model was scripted or traced, and cannot be changed", hint="Optimize it first.")
    if hasattr(model, "_orig_mod"):
        raise UsageError("the model is compiled already", hint="Optimize first: torch.compile(plan.model).")
    devices = resolve(gpu)
    if len(devices) != 1:
        raise UsageError("a plan is made for one GPU", hint='Name one: gpu="h200".')
    live = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    run = Run(
        model=model if inplace else copy.deepcopy(model),
        inputs=inputs,
        train=train,
        amp=amp,
        tf32=tf32,
        optimizer=type(live).__name__.lower() if live else str(optimizer),
        fused_optimizer=fused_optimizer,
        channels_last=channels_last,
        compiled=compile,
        loss=loss,
        live_optimizer=live,
    )
    fixes = [fix for fix in select_fixes(select, ignore) if level == UNSAFE or fix.level == SAFE]
    deadline_s = time.monotonic() + budget if budget is not None else float("inf")
    if measure:
        require_cuda(run)
    planner = _Planner(run, devices[0], fixes, min_gain, verify)
    try:
        while time.monotonic() < deadline_s and planner.improve():
            pass
        if measure:
            planner.measure()
    except BaseException:
        planner.take_back()
        raise
    return planner.plan()


def _gains(times_s: Sequence[float]) -> list[float]:
    return [before - after for before, after in pairwise(times_s)]


@dataclass(frozen=True, slots=True)
class _Priced:
    """A run with its price."""

    run: Run
    step: Step
    estimate: StepEstimate


_Key = tuple[str, Candidate]


class _Planner:
    """The search: greedy, and lazy in that a candidate is priced again only when it could be the best.

    What a candidate saved on top of fewer fixes is taken for what it will save on top of more, until nothing
    else is left.
    """

    def __init__(self, run: Run, gpu: Gpu, fixes: Sequence[Fix], min_gain: float, verify: bool) -> None:
        self.run = run
        self.gpu = gpu
        self.fixes = fixes
        self.min_gain = min_gain
        self.verify = verify
        self.first = self.now = self._priced(run.on_meta())
        self.applied: list[AppliedFix] = []
        self.refused: dict[RefusedFix, None] = {}
        self.candidates: list[Candidate] = []
        self.undos: list[Undo] = []
        self.times_s: list[float] = []
        self._gains: dict[_Key, float] = {}
        self._unfit: set[_Key] = set()

    def improve(self) -> bool:
        """Apply the best fix that is left; False where none is worth it."""
        waiting = self._candidates()
        priced: dict[_Key, _Priced] = {}
        while waiting:
            fix, candidate = waiting.pop(0)
            key = (fix.name, candidate)
            if key not in priced:
                after = self._tried(fix, candidate)
                if after is None:
                    continue
                priced[key] = after
                self._gains[key] = self.now.estimate.time_s - after.estimate.time_s
                if waiting and self._gains[key] < self._known_gain_s(waiting[0]):
                    waiting.append((fix, candidate))
                    waiting.sort(key=self._known_gain_s, reverse=True)
                    continue
            if self._is_worth(priced[key]) and self._apply(fix, candidate, priced[key]):
                self.now = priced[key]
                return True
        return False

    def _is_worth(self, after: _Priced) -> bool:
        """Above what counts as a change, and a gain nine times in ten."""
        gain_s, low_s, _ = self._gain(after)
        return gain_s >= self.min_gain * self.first.estimate.time_s and (low_s > 0 or self.min_gain < 0)

    def _gain(self, after: _Priced) -> tuple[float, float, float]:
        return gain(self.now.estimate, after.estimate, Change(step=after.step))

    def _known_gain_s(self, entry: tuple[Fix, Candidate]) -> float:
        fix, candidate = entry
        return self._gains.get((fix.name, candidate), float("inf"))

    def _candidates(self) -> list[tuple[Fix, Candidate]]:
        context = Context(self.now.step, self.gpu, self.now.estimate, self.now.run)
        changed = {path for fix in self.applied for path in fix.modules}
        found = []
        for fix in self.fixes:
            for candidate in fix.find(context):
                if isinstance(candidate, Refusal):
                    # What another fix has changed is not refused.
                    if not changed.intersection(candidate.modules):
                        self._refuse(fix, candidate.modules, candidate.reason)
                elif (fix.name, candidate) not in self._unfit:
                    found.append((fix, candidate))
        return sorted(found, key=self._known_gain_s, reverse=True)

    def _tried(self, fix: Fix, candidate: Candidate) -> _Priced | None:
        """The run with the candidate on top; None where that cannot be."""
        run = self.now.run.on_meta()
        try:
            candidate.apply(run)
            return self._priced(run)
        except (RefusedError, CaptureError) as error:
            self._reject(fix, candidate, error.what)
            return None

    def _priced(self, run: Run) -> _Priced:
        step = run.capture()
        if run.compiled:
            step = fuse(step)
        return _Priced(run, step, estimate_step(step, self.gpu))

    def _apply(self, fix: Fix, candidate: Candidate, after: _Priced) -> bool:
        proofs: list[Verification] = []
        try:
            for proof in self._proofs(candidate):
                if not proof.ok:
                    self._reject(fix, candidate, f"not proven the same: {proof}")
                    return False
                proofs.append(proof)
            self.undos.append(candidate.apply(self.run))
        except RefusedError as refused:
            self._reject(fix, candidate, refused.what)
            return False
        self.candidates.append(candidate)
        gain_s, low_s, high_s = self._gain(after)
        in_fp64, on_gpu = (*proofs, None, None)[:2]
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
        return True

    def _proofs(self, candidate: Candidate) -> Iterator[Verification]:
        """In fp64 on the CPU; and where the model is on a GPU, there."""
        if self.verify and candidate.modules:
            yield prove(self.run, candidate)
            if all(parameter.is_cuda for parameter in self.run.model.parameters()):
                yield prove_in_place(self.run, candidate)

    def _reject(self, fix: Fix, candidate: Candidate, reason: str) -> None:
        self._unfit.add((fix.name, candidate))
        self._refuse(fix, candidate.modules, reason)

    def _refuse(self, fix: Fix, modules: tuple[str, ...], reason: str) -> None:
        self.refused.setdefault(RefusedFix(fix.name, modules, reason))

    def measure(self) -> None:
        """Measure what the fixes gain; keep those that gain."""
        times_s = self._measured()
        while slower := [i for i, gain_s in enumerate(_gains(times_s)) if gain_s < -_NOISE * times_s[0]]:
            for index in reversed(slower):
                fix = self.applied.pop(index)
                self.candidates.pop(index)
                self.refused.setdefault(
                    RefusedFix(fix.name, fix.modules, "it was measured, and it is no gain on this GPU")
                )
            times_s = self._measured()
        self.times_s = times_s
        self.applied = [
            replace(fix, measured_s=gain_s) for fix, gain_s in zip(self.applied, _gains(times_s), strict=True)
        ]
        self.undos = [candidate.apply(self.run) for candidate in self.candidates]

    def _measured(self) -> list[float]:
        self.take_back()
        return step_times_s(self.run, self.candidates)

    def take_back(self) -> None:
        """Undo what was applied."""
        while self.undos:
            self.undos.pop()()

    def plan(self) -> Plan:
        return Plan(
            model=self.run.model,
            run=self.run,
            gpu=self.gpu.name,
            fixes=tuple(self.applied),
            refused=tuple(self.refused),
            before_s=self.times_s[0] if self.times_s else self.first.estimate.time_s,
            after_s=self.times_s[-1] if self.times_s else self.now.estimate.time_s,
            before_bytes=self.first.step.memory.peak_bytes,
            after_bytes=self.now.step.memory.peak_bytes,
            provenance=MEASURED if self.times_s else ESTIMATED,
            candidates=tuple(self.candidates),
            undos=self.undos,
        )
