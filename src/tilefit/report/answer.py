"""What a report comes down to: what to do, and what it is worth in time, work and money."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil

from tilefit import units
from tilefit.report.report import Combination, Report
from tilefit.rules.finding import ADVICE, SAFE

#: What is as good as the best: fewer things to do count more than this share of the time.
_AS_GOOD = 0.02
#: A choice worth naming saves at least this share of the step.
_WORTH = 0.01
_NUMBERS = ("nothing", "one thing", "two things", "three things", "four things")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer, for whoever pays.

    Attributes:
        title: What to do: ``105 ms → about 41.8 ms: do these two things``.
        findings: What these things are, as indices into the report's findings.
        lines: What that means in work per second, and in money.
    """

    title: str
    findings: tuple[int, ...]
    lines: tuple[str, ...]


def work(report: Report) -> tuple[str, int]:
    """What a step gets done: ``("tokens", 16384)``, or samples; 0 where it is not known."""
    return ("tokens", report.batch * report.tokens) if report.tokens else ("samples", report.batch)


def bulk(unit: str) -> tuple[str, float]:
    """The amount of work that costs are stated for: ``("billion tokens", 1e9)``."""
    return ("billion tokens", 1e9) if unit == "tokens" else ("million samples", 1e6)


def best(report: Report) -> Combination:
    """The fewest of the safe findings that save as much as any choice of them; without safe ones of the
    others but those that may change training."""
    for allowed in ((SAFE,), (SAFE, ADVICE)):
        some = [
            each
            for each in report.combinations
            if all(report.findings[index].safety in allowed for index in each.findings)
            and each.time_s < (1 - _WORTH) * report.step.time_s
        ]
        if some:
            least_s = min(each.time_s for each in some)
            good = [each for each in some if each.time_s <= (1 + _AS_GOOD) * least_s]
            return min(good, key=lambda each: (len(each.findings), each.time_s))
    return Combination((), report.step.time_s)


def price_of(report: Report, prices: Mapping[str, float] | None) -> float | None:
    """What an hour of the report's GPU costs; None where it is not said."""
    return (prices or {}).get(report.gpu, (prices or {}).get(""))


def cost(report: Report, time_s: float, price: float) -> float:
    """What the bulk of work costs at so much an hour, where a step takes ``time_s``."""
    unit, items = work(report)
    return price * bulk(unit)[1] / items * time_s / 3600


def answer(report: Report, prices: Mapping[str, float] | None = None) -> Answer:
    """What to do.

    Args:
        report: Of a step on a GPU.
        prices: Of a GPU for an hour, by name; "" stands for all others.
    """
    step, use, device = report.step, report.step.memory, report.device
    chosen = best(report)
    then = f"{units.seconds(step.time_s)} → about {units.seconds(chosen.time_s)}"
    if use.taken_bytes > device.memory_bytes:
        count = ceil(use.taken_bytes / device.memory_bytes)
        title = (
            f"Does not fit: {units.capacity(use.taken_bytes)} of {units.capacity(device.memory_bytes)}; "
            f"needs {count} GPUs at least, or a smaller batch"
        )
        return Answer(title, chosen.findings, tuple(_lines(report, chosen.time_s, prices)))
    if not chosen.findings:
        title = f"{units.seconds(step.time_s)} a step: {_rest(report)}"
        return Answer(title, (), tuple(_lines(report, step.time_s, prices)))
    things = "do this" if len(chosen.findings) == 1 else f"do these {_NUMBERS[len(chosen.findings)]}"
    return Answer(f"{then}: {things}", chosen.findings, tuple(_lines(report, chosen.time_s, prices)))


def _rest(report: Report) -> str:
    return "nothing is known that would pay" if not report.findings else "no change has a price worth it"


def _lines(report: Report, after_s: float, prices: Mapping[str, float] | None) -> Iterable[str]:
    unit, items = work(report)
    before_s = report.step.time_s
    changes = after_s < before_s
    if items and before_s:
        then = f" → {units.number(items / after_s)}" if changes else ""
        yield f"{units.number(items / before_s)}{then} {unit} per second"
    if changes and after_s:
        yield f"{before_s / after_s:.1f} times the {unit if items else 'work'} for the money"
    price = price_of(report, prices)
    if price is not None and items:
        then = f" → {units.number(cost(report, after_s, price))}" if changes else ""
        costs = f"{units.number(cost(report, before_s, price))}{then} per {bulk(unit)[0]}"
        yield f"{costs}, at {units.number(price)} per GPU and hour"
