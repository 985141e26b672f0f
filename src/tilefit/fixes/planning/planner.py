"""Chooses fixes by what they are worth, proves them, applies them."""

from __future__ import annotations

import copy
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, Unpack

import torch
from torch import nn

from tilefit import units
from tilefit.capture.failures import ON_CPU
from tilefit.capture.trees import tensors
from tilefit.cost import StepEstimate, estimate_step
from tilefit.cost.estimate import ESTIMATED, MEASURED
from tilefit.cost.priced import PricedGpu, resolve
from tilefit.errors import CaptureError, UsageError
from tilefit.fixes.changes.behaviour import Edits
from tilefit.fixes.changes.fix import ChangeSet, Context, Fix, RefusedError, Stage
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds.settings import is_fused, like
from tilefit.fixes.planning.measuring import Gain, require_cuda, step_times_s
from tilefit.fixes.planning.plan import AppliedFix, Plan, RefusedFix
from tilefit.fixes.planning.registry import select as select_fixes
from tilefit.fixes.proof.likeness import shrunken, with_values
from tilefit.fixes.proof.verification import Verification, prove, prove_in_place
from tilefit.gpus import Gpu
from tilefit.ops import Step
from tilefit.options import (
    FixSelection,
    OptimizerName,
    Selection,
    SelectionKeywords,
    StepKeywords,
    StepOptions,
    taken,
)
from tilefit.rules.base import Change
from tilefit.rules.engine import gain
from tilefit.rules.finding import SAFE, UNSAFE

LEVELS = (SAFE, UNSAFE)


class OptimizeKeywords(StepKeywords, SelectionKeywords, total=False):
    """The keywords of :func:`optimize` beyond its own."""

    optimizer: OptimizerName | torch.optim.Optimizer  # type: ignore[misc]


#: Smallest gain worth a change, as a share of the step: below, the prediction is noise.
MIN_GAIN = 0.01
#: A plan is to be no loss where the host takes so many times as long for launches as the one that their costs
#: are stated for. Hosts of one kind of machine differed by a factor of two (:mod:`tilefit.cost.launch`).
HOSTS = (0.7, 3.0)
#: What a plan may lose on such a host, relative to what it saves on the one found, both as shares of a step.
#: A choice: NHWC takes 40 % off a convolutional network's step, and adds 3 % where the host is the limit.
_RISKED = 0.1
#: Share of a step by which two ways to sum up the same times may differ.
_ROUNDING = 1e-9

#: Where code reads values, a step on so many samples is run for real, as long as its largest input has not
#: more elements, times parameters, than this: some 10 s a capture on two CPU cores. A choice.
_SAMPLES, _MOST_WORK = 2, 2e11

#: Is told what is being done.
Say = Callable[[str], None]
_Proof = Callable[[Run, Sequence[ChangeSet]], Verification]


def optimize(
    model: nn.Module,
    inputs: Any = None,
    *,
    gpu: str | Gpu | None = None,
    level: str = SAFE,
    budget: float | None = None,
    memory_bytes: float | None = None,
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
        inputs: As for :func:`tilefit.check`.
        gpu: Likewise; one GPU.
        loss: Likewise.
        level: ``"safe"``: fixes that keep the function; ``"unsafe"``: also those that may change training.
        budget: Seconds after which no further fix is looked for; None for no limit.
        memory_bytes: What the tensors of a step may take at once; None for what fits the GPU. A training step
            that needs more is made to compute some modules again in its backward pass (``checkpoint``).
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
    given = keywords.get("optimizer")
    live = given if isinstance(given, torch.optim.Optimizer) else None
    of_live = {"optimizer": like(live, model), "fused_optimizer": is_fused(live)} if live else {}
    options, selection = taken("optimize", {**keywords, **of_live}, StepOptions, FixSelection)
    run = Run(
        model=model if inplace else copy.deepcopy(model),
        inputs=inputs,
        options=options,
        loss=loss,
        # Of a copy the caller's optimizer has no parameter: what the plan says of it is to be done.
        live_optimizer=live if inplace else None,
        memory_bytes=memory_bytes,
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
    say: Say = lambda _: None,
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
    hosts = () if measure else HOSTS
    say("Pricing the step as it is")
    try:
        planner = _Planner(run, run, gpu, fixes, min_gain, hosts, say)
    except CaptureError as error:
        if run.live_optimizer is not None:
            _blame(run.live_optimizer, run, error)
        if error.hint != ON_CPU:
            raise
        say("Pricing the step on real data, since its code reads values")
        planner = _Planner(run, _on_real_data(run, error), gpu, fixes, min_gain, hosts, say)
    with planner.edits.all_or_none():
        proofs = None
        while proofs is None:
            while time.monotonic() < deadline_s and planner.improve():
                pass
            planner.fit()
            proofs = planner.settle(verify)
        return planner.measured(proofs) if measure else planner.plan(proofs)


def _refuse_unchangeable(model: object) -> None:
    """Refuse what is no model that fixes can change.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"what is of type {type(model).__name__} cannot be optimized", hint="Pass a torch.nn.Module."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError("the model was scripted or traced, and cannot be changed", hint="Optimize it first.")
    if hasattr(model, "_orig_mod"):
        raise UsageError(
            "the model is compiled already",
            hint="Give it as it was before, with compile=True (--compile), and compile plan.model.",
        )


def _on_real_data(run: Run, error: CaptureError) -> Run:
    """The run on two samples with values, for code that reads some.

    Raises:
        CaptureError: that one, where this would take too long.
    """
    few = with_values(shrunken(run.inputs, {"batch": _SAMPLES}), run.model)
    first, cut = (next((t for t in tensors(inputs) if t.dim()), None) for inputs in (run.inputs, few))
    size = max((t.numel() for t in tensors(few)), default=0) * sum(p.numel() for p in run.model.parameters())
    if first is None or cut is None or size > _MOST_WORK:
        error.hint = (
            "The model is too large to be tried on real data here; tilefit check --on-cpu shows findings."
        )
        raise error
    options = replace(run.options, on_cpu=True)
    return replace(run, inputs=few, options=options, samples=len(first) / len(cut), live_optimizer=None)


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


class Proposal(NamedTuple):
    """A change with the fix that proposes it."""

    fix: Fix
    change: ChangeSet


@dataclass(frozen=True, slots=True)
class _State:
    """A run with changes, and what it costs.

    Attributes:
        run: On ``meta``.
        made: The changes that are made.
        written: The step as the model is written, in which fixes look for what they can change.
        step: The step as it runs: what the compiler makes of it, where it is compiled.
        estimate: On the host as it was found.
        on_hosts: On each of ``HOSTS``.
    """

    run: Run
    made: tuple[Proposal, ...]
    written: Step
    step: Step
    estimate: StepEstimate
    on_hosts: tuple[StepEstimate, ...]


@dataclass(eq=False)
class _Planner:
    """The search: greedy, and lazy in that a change is priced again only when it could be the best.

    What a change saved on top of fewer others is taken for what it will save on top of more, until nothing
    else is left.
    """

    run: Run
    #: The same model, as it is captured and proven.
    tried: Run
    gpu: PricedGpu
    fixes: Sequence[Fix]
    min_gain: float
    #: The step is priced on these, too: what is measured here need not pay on other hosts.
    hosts: tuple[float, ...]
    say: Say
    #: By fix and modules the last reason: what is refused now may be made beside other changes.
    refused: dict[tuple[str, tuple[str, ...]], str] = field(default_factory=dict)
    edits: Edits = field(default_factory=Edits)
    _gains: dict[Proposal, float] = field(default_factory=dict)
    _unfit: set[Proposal] = field(default_factory=set)

    def __post_init__(self) -> None:
        #: As the model was, and with each change on top.
        self.states = [self._state(self.tried.on_meta(), ())]

    @property
    def first(self) -> _State:
        return self.states[0]

    @property
    def now(self) -> _State:
        return self.states[-1]

    # ---- the search ----------------------------------------------------------------------------

    def improve(self) -> bool:
        """Take the best change that is left; False where none is worth it."""
        return any(self._best_taken(stage) for stage in (Stage.MODEL, Stage.RUN))

    def _best_taken(self, stage: Stage) -> bool:
        waiting = dict.fromkeys(self._proposals(self.now, stage))
        tried: dict[Proposal, list[_State]] = {}
        while waiting:
            best = max(waiting, key=lambda each: self._gains.get(each, float("inf")))
            if best in tried:
                del waiting[best]
                if self._is_worth(tried[best][-1]):
                    self.states = tried[best]
                    return True
            elif (after := self._tried((below := self._below(best))[-1], best)) is None:
                del waiting[best]
            else:
                tried[best], self._gains[best] = [*below, after], _gain(self.now, after)[0]
                waiting |= dict.fromkeys(self._called_for(best, after))
        return False

    def _below(self, proposal: Proposal) -> list[_State]:
        """The states that a change is made on top of. Compiled, a model does without what compiles parts of
        it: they would run as they are written, and be priced as if they did not."""
        left = [each for each in self.now.made if not each.fix.compiles_parts]
        if not _compiles(proposal.change) or len(left) == len(self.now.made):
            return self.states
        return self._on_top([self.first], left)

    def fit(self) -> None:
        """Take the first change that brings the step into the memory that it may take, if it needs more."""
        budget_bytes = self.run.budget_bytes(self.gpu)
        needs_more = self.now.step.memory.peak_bytes > budget_bytes
        for proposal in self._proposals(self.now, Stage.FIT) if needs_more else ():
            if (after := self._tried(self.now, proposal)) is not None:
                if after.step.memory.peak_bytes <= budget_bytes:
                    self.states.append(after)
                    return
                need, has = map(units.capacity, (after.step.memory.peak_bytes, budget_bytes))
                self.reject(proposal, f"the step would still need {need}, and may take {has}")

    def _proposals(self, state: _State, stage: Stage) -> Iterator[Proposal]:
        """What fixes of a stage would change, but for what was found unfit."""
        # Fixes look at the step as the model is written.
        is_written = state.step is state.written
        estimate = state.estimate if is_written else estimate_step(state.written, self.gpu)
        context = Context(state.written, self.gpu, estimate, state.run)
        changed = {path for made in state.made for path in made.change.modules}
        # With ``min_gain`` below zero a change that gains nothing the second time would be made for ever.
        done = self._unfit.union(state.made)
        is_compiled = state.run.options.compile
        for fix in self.fixes:
            fits = fix.stage == stage and not (is_compiled and fix.compiles_parts)
            for found in fix.find(context) if fits else ():
                if isinstance(found, ChangeSet):
                    if (proposal := Proposal(fix, found)) not in done:
                        yield proposal
                # What another fix has changed is not refused.
                elif not changed.intersection(found.modules):
                    self.refused[fix.name, found.modules] = found.reason

    def _called_for(self, proposal: Proposal, after: _State) -> list[Proposal]:
        """A way to run the whole program once more, with the changes of the model that only it calls for: it
        is not to be judged without them."""
        if proposal.fix.stage != Stage.RUN or proposal.change.changes:
            return []
        # What the model calls for as it is run now was priced before.
        first = [each.change for each in self._proposals(after, Stage.MODEL) if each not in self._gains]
        together = Proposal(proposal.fix, ChangeSet.together(*first, proposal.change))
        return [together] if first and together not in self._unfit else []

    def _on_top(
        self, states: Sequence[_State], proposals: Iterable[Proposal], why: str = "{}"
    ) -> list[_State]:
        """States, and more with changes on top of each other, but for those that cannot be made."""
        states = [*states]
        for each in proposals:
            if (after := self._tried(states[-1], each, why)) is not None:
                states.append(after)
        return states

    def _tried(self, before: _State, proposal: Proposal, why: str = "{}") -> _State | None:
        """The run with a change on top; None where that cannot be: ``why``, around the reason."""
        self.say(f"Pricing {proposal.fix.name}")
        run = before.run.on_meta()
        try:
            if proposal.fix.stage != Stage.TRIED:  # which is about what really runs
                proposal.change.apply(run)
            return self._state(run, (*before.made, proposal))
        except (RefusedError, CaptureError) as error:
            self.reject(proposal, why.format(error.what))
            return None

    def reject(self, proposal: Proposal, reason: str) -> None:
        """Leave a change out for good."""
        self._unfit.add(proposal)
        self.refused[proposal.fix.name, proposal.change.modules] = reason

    # ---- prices --------------------------------------------------------------------------------

    def _state(self, run: Run, made: tuple[Proposal, ...]) -> _State:
        written = run.capture()
        step = run.compiled(written)
        is_eager = not (run.options.compile or run.cuda_graph)
        python_s = is_eager * sum(each.change.host_s for each in made)
        estimate = estimate_step(step, self.gpu, python_s=python_s)
        on_hosts = tuple(
            estimate_step(step, self.gpu, estimate.ops, launch_scale=scale, python_s=python_s)
            for scale in self.hosts
        )
        return _State(run, made, written, step, estimate, on_hosts)

    def _is_worth(self, after: _State) -> bool:
        """A gain nine times in ten, on some host above what counts as a change, and on none a loss against
        the model as it was that is not far less than what is saved here."""
        gain_s, low_s, _ = _gain(self.now, after)
        if self.min_gain < 0:
            return gain_s >= self.min_gain * self.now.estimate.time_s
        pairs = zip((self.now.estimate, *self.now.on_hosts), (after.estimate, *after.on_hosts), strict=True)
        counts = any(now.time_s - then.time_s >= self.min_gain * now.time_s for now, then in pairs)
        if not counts or gain_s <= 0 or low_s < 0:
            return False
        saved = 1 - after.estimate.time_s / self.first.estimate.time_s
        for scale, then, first in zip(self.hosts, after.on_hosts, self.first.on_hosts, strict=True):
            loss_s = then.time_s - first.time_s
            if loss_s > max(_RISKED * saved, _ROUNDING) * first.time_s:
                fix, change = after.made[-1]
                self.refused[fix.name, change.modules] = (
                    f"where the host takes {scale:g} times as long for launches, a step would take "
                    f"{units.seconds(loss_s)} longer"
                )
                return False
        return True

    # ---- the proof -----------------------------------------------------------------------------

    def settle(self, verify: bool) -> list[Verification] | None:
        """Prove what was chosen, in fp64 on the CPU and on the GPU that it is on, and change the model.

        None where a part of it cannot be, which is then rejected; the search goes on from before it.
        """
        made, proofs = self.now.made, list[Verification]()
        on_gpu = all(parameter.is_cuda for parameter in self.run.model.parameters())
        ways = (prove, prove_in_place)[: 1 + on_gpu] if verify else ()
        checks: list[Callable[[tuple[Proposal, ...]], str]] = [
            *(cache(partial(self._disproven, way, proofs)) for way in ways),
            self._not_made,
        ]
        for check in checks:
            if check(made):
                # Halved: with nothing but the changes before the first wrong one, no reason is found.
                first = bisect_right([made[:count] for count in range(1, len(made))], "", key=check)
                self.reject(made[first], check(made[: first + 1]))
                self.edits.undo()
                del self.states[first + 1 :]
                return None
        return proofs

    def _disproven(self, way: _Proof, proofs: list[Verification], made: Sequence[Proposal]) -> str:
        """Why the model is not the same function with changes; empty where it is. How the program is run is
        no part of a proof."""
        parts = [part for each in made for part in each.change.changes or (each.change,)]
        changes = [part for part in parts if part.modules]
        if not changes:
            return ""
        names = dict.fromkeys(each.fix.name for each in made if each.change.modules)
        self.say(f"Proving {', '.join(names)}")
        try:
            proof = way(self.tried, changes)
        except RefusedError as refused:
            return refused.what
        proofs.append(proof)
        return "" if proof.ok else f"not proven the same: {proof}"

    def _not_made(self, made: Sequence[Proposal]) -> str:
        """Why changes cannot be made to the model itself; empty where they are."""
        self.edits.undo()
        try:
            for each in made:
                each.change.apply(self.run, self.edits)
        except RefusedError as refused:
            return refused.what
        return ""

    # ---- the plan ------------------------------------------------------------------------------

    def plan(self, proofs: Sequence[Verification], times_s: Sequence[Sequence[float]] = ()) -> Plan:
        """The plan of what was made; ``times_s``: measured, without and with more and more of it."""
        made = self.now.made
        before_s, after_s = self.first.estimate.time_s, self.now.estimate.time_s
        if times_s:
            before_s = statistics.median(times_s[0])
            after_s = before_s - Gain.between(times_s[0], times_s[-1]).time_s
        saved_s: list[float | None] = [gain.time_s for gain in _gains(times_s)] or [None] * len(made)
        fixes = []
        for (before, after), measured_s in zip(pairwise(self.states), saved_s, strict=True):
            fix, change = after.made[-1]
            how = fix.name, fix.level, fix.rules, change.modules, change.words
            in_fp64, on_gpu = (*(proofs if change.modules else ()), None, None)[:2]
            fixes.append(AppliedFix(*how, *_gain(before, after), in_fp64, on_gpu, measured_s))
        done = {(each.name, each.modules) for each in fixes}
        whole = {fix.name for fix in self.fixes if fix.stage == Stage.RUN}
        if whole.intersection(each.name for each in fixes):
            done |= {(name, modules) for name, modules in self.refused if name in whole}
        return Plan(
            model=self.run.model,
            run=self.run,
            gpu=self.gpu.name,
            fixes=tuple(fixes),
            refused=tuple(RefusedFix(*of, why) for of, why in self.refused.items() if of not in done),
            before_s=before_s,
            after_s=after_s,
            before_bytes=self.first.step.memory.peak_bytes,
            after_bytes=self.now.step.memory.peak_bytes,
            provenance=MEASURED if times_s else ESTIMATED,
            candidates=tuple(each.change for each in made),
            step=self.now.step,
            edits=self.edits,
        )

    def measured(self, proofs: Sequence[Verification]) -> Plan:
        """The plan of what is measured to gain: what makes the step slower is taken back, what needs it goes
        too, and all that makes up a plan that is no gain."""
        self.states = self._on_top(self.states, self._proposals(self.now, Stage.TRIED))
        self.edits.undo()
        self.say("Measuring")
        while True:
            made = self.now.made
            times_s = step_times_s(self.run, [each.change for each in made])
            losses = _losses(made, times_s)
            for number, reason in losses.items():
                self.reject(made[number], reason)
            if not losses:
                break
            left = [each for number, each in enumerate(made) if number not in losses]
            self.states = self._on_top([self.first], left, "it goes with a fix that was taken back ({})")
        self._not_made(made)
        return self.plan(proofs, times_s)


def _compiles(change: ChangeSet) -> bool:
    """Whether it compiles the model."""
    return dict(change.options).get("compile", False) or any(map(_compiles, change.changes))


def _gain(before: _State, after: _State) -> tuple[float, float, float]:
    """What is saved, with the bounds of it."""
    return gain(before.estimate, after.estimate, Change(step=after.step))


def _gains(times_s: Sequence[Sequence[float]]) -> list[Gain]:
    return [Gain.between(before, after) for before, after in pairwise(times_s)]


def _losses(made: Sequence[Proposal], times_s: Sequence[Sequence[float]]) -> dict[int, str]:
    """Changes that do not stay, by their number, with the reason."""
    # What makes the step fit the memory is worth the time that it takes.
    gains = {n: gain for n, gain in enumerate(_gains(times_s)) if made[n].fix.stage != Stage.FIT}
    losses = [
        number
        for number, gain in gains.items()
        if gain.high_s < 0 or (made[number].fix.stage == Stage.TRIED and gain.low_s <= 0)
    ]
    together_s = Gain.between(times_s[0], times_s[-1]).time_s
    if not losses and len(gains) == len(made) and together_s < 0:
        # No single one for sure, all together none the less.
        losses = [min(gains, key=lambda number: gains[number].time_s)]
    return {number: f"measured on this GPU, {_effect(gains[number].time_s)}" for number in losses}


def _effect(gain_s: float) -> str:
    longer = f"a step takes {units.seconds(-gain_s)} longer with it"
    return longer if gain_s < 0 else "it saves no more than the noise"
