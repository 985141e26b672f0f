"""Runs the rules: prices what they propose, drops what is not worth it, ranks the rest."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations as choices
from math import hypot, inf
from typing import Unpack

from tilefit.cost import Estimate, StepEstimate, estimate_step, step_s
from tilefit.cost.estimate import EXPOSED, LAUNCH, WAITS
from tilefit.cost.priced import priced
from tilefit.gpus import Gpu
from tilefit.ops import Step
from tilefit.options import Selection, SelectionKeywords, taken
from tilefit.rules.base import Change, Context, Edits, Proposal, changed
from tilefit.rules.finding import ERROR, NOTE, SAFE, THROUGHPUT, WARNING, Finding
from tilefit.rules.registry import select as select_rules

#: Smallest gain worth a finding, as a share of the step.
MIN_GAIN = 0.005
#: A finding worth this share of the step is a warning, below it a note.
WARNING_SHARE = 0.05
#: Below this share of the time of the operations it touches, a change is lost in the noise: runs of the
#: same GEMM on the same GPU differ by 2 % and more.
OPERATION_SHARE = 0.03
#: The part of an interval that an operation does not share with one on the same path.
_OWN_SHARE = 0.2
#: Findings whose combinations are priced, by the most operations of a step: of 1,000 a choice takes 7 ms, and
#: 0.1 s where it is compiled (2 CPU cores).
_CHOSEN_FROM = {4: 2_000, 3: 5_000, 2: 20_000}


@dataclass(frozen=True, slots=True)
class Found:
    """A finding with the change that it was priced by; None where it has no price."""

    finding: Finding
    change: Change | None


def run(
    step: Step, gpu: Gpu, estimate: StepEstimate | None = None, **keywords: Unpack[SelectionKeywords]
) -> list[Finding]:
    """The findings of :func:`find` in a step that may have to be priced first."""
    (selection,) = taken("run", keywords, Selection)
    gpu = priced(gpu)
    context = Context(step, gpu, estimate or estimate_step(step, gpu))
    return [each.finding for each in find(context, selection)]


def find(context: Context, selection: Selection) -> list[Found]:
    """What is worth changing in a step on a GPU, best first; errors before everything, then warnings that
    have no price, and throughput, which makes no step shorter, behind everything. Savings that differ by less
    than a thousandth of the step are equal: safe ones come first.

    Every proposal is priced by estimating the whole step again with the change made, its costs (padded
    arithmetic, copies, larger activations) included.

    Raises:
        UsageError: a code fits no rule.
    """
    min_gain = MIN_GAIN if selection.min_gain is None else selection.min_gain
    ignored = {
        pattern: {rule.code for rule in select_rules(codes)}
        for pattern, codes in selection.per_module_ignores.items()
        if codes
    }
    found = []
    for rule in select_rules(selection.select, selection.ignore):
        for proposal in rule.check(context):
            if any(
                rule.code in codes and fnmatchcase(proposal.place.module, pattern)
                for pattern, codes in ignored.items()
            ):
                continue
            finding = _price(context, rule.code, proposal)
            if finding.severity == ERROR or _is_worth(context, proposal, finding, min_gain):
                found.append(Found(finding, proposal.change))
    return sorted(
        found,
        key=lambda f: (
            f.finding.severity != ERROR,
            f.change is not None or f.finding.severity == NOTE,
            f.finding.safety == THROUGHPUT,
            # Of two that save as much, as where the host limits what is left, the safe one.
            -round(f.finding.gain_fraction, 3),
            f.finding.safety != SAFE,
            -f.finding.gain_s,
            f.finding.code,
            f.finding.module,
        ),
    )


def safe_gain_s(
    context: Context, found: Sequence[Found], times_s: Iterable[tuple[tuple[int, ...], float]]
) -> float:
    """What the findings with a safe fix save together, in seconds per step; see :func:`together_s`.

    Args:
        context: What the findings are of.
        found: All of them.
        times_s: Of some choices of them, by :func:`combinations`: what saves less with all is left out.
    """
    safe = [each for each in found if each.finding.safety == SAFE]
    best_s = [context.estimate.time_s - each.finding.gain_s for each in safe]
    best_s += [
        time_s for chosen, time_s in times_s if all(found[each].finding.safety == SAFE for each in chosen)
    ]
    return max(0.0, context.estimate.time_s - min(together_s(context, safe), *best_s, inf))


def together_s(context: Context, found: Iterable[Found]) -> float:
    """The step's time with several findings' changes made, in seconds.

    Gains overlap and do not add up, so the step is priced once with all changes, the largest first; one that
    touches an operation that is changed already is left out. Of the changes of the whole step, one that can
    be made of a changed step (compilation) follows; the others stand alone, and count where one of them is
    better than everything else. What changes the work is left out. So no operation's time is counted twice,
    and what several changes of one operation might save beyond the best of them is not counted.
    """
    changes = [
        each.change
        for each in sorted(found, key=lambda each: -each.finding.gain_s)
        if each.change is not None and each.change.work_ratio == 1.0
    ]
    together: Edits = {}
    for change in changes:
        if change.step is None and together.keys().isdisjoint(change.replace):
            together |= change.replace
    step = changed(context.step, Change(together)) if together else context.step
    rewrite = next((change.rewrite for change in changes if change.rewrite), None)
    if rewrite is not None:
        step = rewrite(step)
    times_s = [context.estimate.time_s if step is context.step else step_s(step, context.gpu)]
    alone = [change.step for change in changes if change.step is not None and change.rewrite is None]
    return min(times_s + [step_s(each, context.gpu) for each in alone])


def combinations(context: Context, found: Sequence[Found]) -> list[tuple[tuple[int, ...], float]]:
    """The step's time with some of the findings' changes made, for every choice of those that save most.

    Returns:
        Indices into ``found``, and :func:`together_s` of them; without the empty choice. A choice is never
        slower than a part of it, which can be made in its place. Of a long step fewer findings are chosen
        from, as each choice prices it once.
    """
    most = next((n for n, ops in _CHOSEN_FROM.items() if len(context.step.ops) <= ops), 0)
    saving = [i for i, each in enumerate(found) if each.finding.gain_s > 0 and each.change is not None]
    chosen_from = [i for i in saving if found[i].finding.safety != THROUGHPUT][:most]
    # Alone each has its price already.
    times_s: dict[tuple[int, ...], float] = {
        (i,): context.estimate.time_s - found[i].finding.gain_s for i in chosen_from
    }
    for size in range(2, len(chosen_from) + 1):
        for chosen in choices(chosen_from, size):
            parts_s = min(times_s[part] for part in choices(chosen, size - 1))
            times_s[chosen] = min(parts_s, together_s(context, [found[i] for i in chosen]))
    return list(times_s.items())


def gain(before: StepEstimate, after: StepEstimate, change: Change) -> tuple[float, float, float]:
    """What a change saves, in seconds per step of the original's work, and the 80 % interval of it."""
    gain_s = before.time_s - after.time_s / change.work_ratio
    on_hosts_s = [_gain_on_host_s(before, after, change, before.host_spread**side) for side in (-1, 1)]
    less_s, more_s = (max(0.0, *(side * (gain_s - each) for each in on_hosts_s)) for side in (1, -1))
    high_s = gain_s + hypot(_spread_s(before, after, change, _above_s, _below_s), more_s)
    if change.work_ratio > 1.0:  # more work takes no less time
        high_s = max(gain_s, min(high_s, before.time_s * (1.0 - 1.0 / change.work_ratio)))
    below_s = _spread_s(before, after, change, _below_s, _above_s)
    low_s = gain_s - hypot(below_s, less_s)
    # A host may take so long that nothing is gained, but no change of the GPU's work makes it slower.
    return gain_s, max(0.0, low_s) if below_s < gain_s else low_s, high_s


def _gain_on_host_s(before: StepEstimate, after: StepEstimate, change: Change, scale: float) -> float:
    """What a change saves where the host takes so many times as long; of more work, that share of it."""
    before_s, after_s = (_on_host_s(each, scale) for each in (before, after))
    after_s /= change.work_ratio
    return before_s - after_s if change.work_ratio == 1.0 else before.time_s * (1.0 - after_s / before_s)


def _on_host_s(estimate: StepEstimate, scale: float) -> float:
    """A step's time on such a host."""
    bounds_s = estimate.bound_time_s
    waits_s, exposed_s = bounds_s.get(WAITS, 0.0), bounds_s.get(EXPOSED, 0.0)
    gpu_s = estimate.time_s - bounds_s.get(LAUNCH, 0.0) - waits_s - exposed_s
    return max(gpu_s, scale * estimate.host_time_s) + scale * waits_s + exposed_s


def _price(context: Context, code: str, proposal: Proposal) -> Finding:
    gain_s = low_s = high_s = 0.0
    if proposal.change is not None:
        after = estimate_step(changed(context.step, proposal.change), context.gpu)
        gain_s, low_s, high_s = gain(context.estimate, after, proposal.change)
    share = gain_s / context.estimate.time_s if context.estimate.time_s else 0.0
    return Finding(
        code=code,
        severity=proposal.severity or (WARNING if share >= WARNING_SHARE else NOTE),
        module=proposal.place.module,
        source=proposal.place.source,
        message=proposal.message,
        fix=proposal.fix,
        safety=THROUGHPUT if proposal.change and proposal.change.work_ratio != 1.0 else proposal.safety,
        gain_s=gain_s,
        gain_low_s=low_s,
        gain_high_s=high_s,
        gain_fraction=share,
        arithmetic=proposal.arithmetic,
        sites=proposal.place.sites,
        next_command=proposal.next_command,
        origin=context.step.origin(proposal.place.module, proposal.place.source),
    )


def _is_worth(context: Context, proposal: Proposal, finding: Finding, min_gain: float) -> bool:
    """Worth reporting: above the noise of the operations and of the step, and a gain nine times in ten, by
    the times of the GPU; and what has no price."""
    if proposal.change is None:
        return True
    touched_s = context.time_s(proposal.change.replace)
    return (
        finding.gain_fraction >= min_gain
        and finding.gain_s >= OPERATION_SHARE * touched_s
        and finding.gain_low_s >= 0 < finding.gain_s
    )


def _spread_s(
    before: StepEstimate,
    after: StepEstimate,
    change: Change,
    width_s: Callable[[Estimate], float],
    opposite_s: Callable[[Estimate], float],
) -> float:
    """How far the gain's 80 % interval reaches to one side of it, as far as the GPU's times go.

    The gain is least where the replaced operations take less than predicted (``width_s`` is then how much
    less) and their replacements more (``opposite_s``); and the other way round.

    How the errors of the operations combine is a choice:

    - The same shape in several layers is wrong in the same way, so equal pairs add up linearly.
    - An operation and its replacement that take the same path (kernel family and bound) err through the
      same ceiling, by nearly the same factor: uncertain is the difference of the two widths, and a fifth
      of each width that is its own. A replacement on another path errs on its own altogether. These add in
      quadrature.
    - Different pairs err independently and add in quadrature.
    - Where the whole step changes there are no pairs: what is said of a pair holds for each path.
    """
    if not change.replace:
        paths: dict[tuple[str, str], float] = defaultdict(float)
        for sign, estimates in ((1, before.ops), (-1, after.ops)):
            for estimate in estimates:
                paths[estimate.kernel_family, estimate.bound] += sign * width_s(estimate)
        return hypot(*paths.values())
    pairs: Counter[tuple[Estimate, tuple[Estimate, ...]]] = Counter()
    shift = 0
    for index in sorted(change.replace):
        count = len(change.replace[index])
        start = index + shift
        pairs[before.ops[index], tuple(after.ops[start : start + count])] += 1
        shift += count - 1
    widths = []
    for (old, new), count in pairs.items():
        same = [e for e in new if (e.kernel_family, e.bound) == (old.kernel_family, old.bound)]
        other = [e for e in new if (e.kernel_family, e.bound) != (old.kernel_family, old.bound)]
        shared = width_s(old) - sum(map(width_s, same)) / change.work_ratio
        own = sum(map(opposite_s, other)) / change.work_ratio
        unlike = _OWN_SHARE * hypot(width_s(old), sum(map(opposite_s, same)) / change.work_ratio)
        widths.append(count * hypot(shared, own, unlike if same else 0.0))
    return hypot(*widths)


def _below_s(estimate: Estimate) -> float:
    return estimate.time_s - estimate.low_s


def _above_s(estimate: Estimate) -> float:
    return estimate.high_s - estimate.time_s
