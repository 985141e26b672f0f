"""What machines are told: findings and alarms in one shape, for the formats that say so much and no more."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tilefit.report import text
from tilefit.report.report import Document
from tilefit.report.watched import Watched
from tilefit.rules.finding import Alarm, Finding, RulePage

_PLACE = re.compile(r"(.+):(\d+)")
_FIGURES = ("gain_s", "gain_low_s", "gain_high_s", "gain_fraction", "safety", "sites")
_FIGURES_OF_ALARMS = ("first_step", "steps")
_PYTHON_TARGET = re.compile(r"(.+\.py):\w+")


@dataclass(frozen=True, slots=True)
class Remark:
    """One finding or alarm.

    Attributes:
        code, severity, module: As of :class:`~tilefit.rules.finding.Finding`.
        path: The file; empty where there is none.
        line: Its line, counted from 1; None where unknown.
        price: What a finding saves, or how often an alarm was seen.
        message: What is wrong, one sentence.
        details: The arithmetic, and what to do, a line each.
        figures: Numbers for programs, by name.
    """

    code: str
    severity: str
    module: str
    path: str
    line: int | None
    price: str
    message: str
    details: tuple[str, ...]
    figures: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Subject:
    """What the remarks are about: a step on one GPU, or a run.

    Attributes:
        title: In words.
        target: What was checked: ``train.py:build``, ``hf:gpt2``.
        gpu: The GPU's short name; empty for a run.
        remarks: The most important first.
        rules: The documentation of the rules behind them.
        libraries: Folders that files of installed packages are in, which are not the user's.
        version: The version of tilefit.
        nothing: What to say where there is no remark.
    """

    title: str
    target: str
    gpu: str
    remarks: tuple[Remark, ...]
    rules: tuple[RulePage, ...]
    libraries: tuple[str, ...]
    version: str
    nothing: str

    @property
    def path(self) -> str:
        """The file that is most nearly the target, for a remark without one."""
        file = _PYTHON_TARGET.fullmatch(self.target)
        return file[1] if file else self.target


def subjects(document: Document) -> list[Subject]:
    """One for each GPU; for a run that was watched one."""
    if isinstance(document, Watched):
        return [
            Subject(
                title=text.watched_heading(document),
                target=text.plain(document.title) or "training",
                gpu="",
                remarks=tuple(map(_remark, document.findings)),
                rules=document.rules,
                libraries=(),
                version=document.version,
                nothing=text.NOTHING_WRONG,
            )
        ]
    return [
        Subject(
            title=f"{text.heading(report)} on {text.plain(report.device.title)}",
            target=text.plain(report.model) or "model",
            gpu=text.plain(report.gpu),
            remarks=tuple(map(_remark, report.findings)),
            rules=report.rules,
            libraries=tuple(report.environment),
            version=report.version,
            nothing=text.NOTHING,
        )
        for report in document.reports
    ]


def _remark(item: Finding | Alarm) -> Remark:
    names = _FIGURES if isinstance(item, Finding) else _FIGURES_OF_ALARMS
    origin = item.origin if isinstance(item, Finding) else ""
    details = (*item.arithmetic, f"Fix{text.level(item)}: {item.fix}")
    if origin and item.source:
        details = (f"in {item.source}, made in this line", *details)
    return Remark(
        item.code,
        item.severity,
        text.plain(item.module),
        *_place(origin or item.source),
        text.price(item),
        text.plain(item.message),
        tuple(map(text.plain, details)),
        {name: getattr(item, name) for name in names},
    )


def _place(source: str) -> tuple[str, int | None]:
    plain = text.plain(source)
    place = _PLACE.fullmatch(plain)
    return (place[1], int(place[2])) if place else (plain, None)
