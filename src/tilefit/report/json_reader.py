"""Opens the JSON form of a report: what :meth:`~tilefit.report.report.Document.to_json` wrote."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from math import inf, isfinite
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin

from tilefit.cost.estimate import DATASHEET, ESTIMATED, MEASURED, TRANSFERRED
from tilefit.errors import UsageError
from tilefit.ops import PHASES
from tilefit.ops.step_json import types_of
from tilefit.report.report import REPORT_SCHEMA, Comparison, Document, OpRow, Report, StepSummary
from tilefit.report.watched import Watched
from tilefit.rules.finding import ADVICE, ERROR, NOTE, SAFE, THROUGHPUT, UNSAFE, WARNING, Alarm, Finding
from tilefit.version import __version__

#: Fields that a file may lack although every report has them: operations once were written only on request.
ABSENT: dict[tuple[type, str], Any] = {(Report, "ops"): ()}
#: Fields that hold one of a few words.
WORDS: dict[tuple[type, str], tuple[str, ...]] = {
    (Finding, "severity"): (ERROR, WARNING, NOTE),
    (Finding, "safety"): (SAFE, UNSAFE, ADVICE, THROUGHPUT),
    (Alarm, "severity"): (ERROR, WARNING, NOTE),
    (OpRow, "phase"): PHASES,
    (StepSummary, "provenance"): (DATASHEET, TRANSFERRED, ESTIMATED, MEASURED, ""),
}

#: In the names of the fields whose numbers may be below 0: what a change saves, and what a profiler adds, may
#: be less than nothing.
SIGNED = ("gain", "overhead")

_HINT = "Name a file that tilefit check, profile or precision wrote with --output-format json."

_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def load(path: str | os.PathLike[str], *, note: Callable[[str], None] = warnings.warn) -> Document:
    """The report in a file.

    Args:
        path: A file that ``tilefit check`` (``profile``, ``precision``) wrote with ``--output-format json``.
        note: Is told where something in the file is not shown, because a later version wrote it.

    Raises:
        UsageError: there is no such file, it holds no report, or one that this version cannot read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path), hint=_HINT) from error
    except UnicodeDecodeError as error:
        raise UsageError("is no text in UTF-8", where=str(path), hint=_HINT) from error
    return loads(text, where=str(path), note=note)


def loads(text: str, *, where: str = "", note: Callable[[str], None] = warnings.warn) -> Document:
    """The report in a text; ``where`` names it in messages. Errors as of :func:`load`."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is not JSON: {error}", where=where, hint=_HINT) from error
    if isinstance(data, dict) and "traceEvents" in data:
        raise UsageError(
            "is a trace, not a report", where=where, hint=f"Look into it: tilefit profile {where or 'FILE'}."
        )
    if not isinstance(data, dict) or not isinstance(data.get("schema_version"), int):
        raise _no_report("it has no schema_version", where)
    version = data["schema_version"]
    if version > REPORT_SCHEMA:
        raise UsageError(
            f"is of version {version} of the format; tilefit {__version__} reads up to {REPORT_SCHEMA}",
            where=where,
            hint="Upgrade tilefit, or write the report again with this version.",
        )
    reader = _Reader(where)
    document: Document
    if "reports" in data:
        document = Comparison(tuple(reader.reports(data["reports"])))
    else:
        document = reader.read(Watched if data.get("kind") == "watched" else Report, data, "")
    if reader.unknown:
        names = ", ".join(sorted(reader.unknown))
        note(f"{where or 'the report'}: tilefit {__version__} does not know, and left out: {names}")
    return document


class _Reader:
    """Builds dataclasses from data, by the types of their fields.

    Attributes:
        unknown: Names of what no field holds.
    """

    def __init__(self, where: str) -> None:
        self.unknown: set[str] = set()
        self._where = where

    def reports(self, values: Any) -> list[Report]:
        if not isinstance(values, list) or not values:
            raise _no_report("its reports are no list of any", self._where)
        return [self.read(Report, value, f"reports[{index}]") for index, value in enumerate(values)]

    def read(self, kind: Any, value: Any, path: str) -> Any:
        """``value`` as a ``kind``: a dataclass, a number, text, or an Optional, tuple or dict of such."""
        if is_dataclass(kind):
            return self._object(kind, value, path)
        if kind in _NAMES:
            return self._scalar(kind, value, path)
        options = get_args(kind)
        if get_origin(kind) is tuple:
            return self._tuple(options, value, path)
        if get_origin(kind) is dict:
            if not isinstance(value, dict):
                self._wrong("an object", path)
            return {key: self.read(options[1], each, f"{path}.{key}") for key, each in value.items()}
        if value is None:
            return None
        (present,) = (option for option in options if option is not NoneType)
        return self.read(present, value, path)

    def _object(self, kind: Any, value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            self._wrong("an object", path)
        types = types_of(kind)
        missing = [name for name in required(kind) if name not in value]
        if missing:
            names = ", ".join(f"{path}.{name}".lstrip(".") for name in missing)
            raise _no_report(f"it lacks {names}", self._where)
        self.unknown |= {
            name for name in value if name not in types and name not in ("schema_version", "kind")
        }
        absent = {name: default for (owner, name), default in ABSENT.items() if owner is kind}
        known = {
            name: self.read(types[name], each, f"{path}.{name}".lstrip("."))
            for name, each in value.items()
            if name in types
        }
        for name, each in known.items():
            words = WORDS.get((kind, name), (each,))
            if each not in words:
                self._wrong(f"one of {', '.join(filter(None, words))}", f"{path}.{name}".lstrip("."))
        return kind(**{**absent, **known})

    def _tuple(self, kinds: tuple[Any, ...], values: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(values, list):
            self._wrong("a list", path)
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(values)
        elif len(values) != len(kinds):
            self._wrong(f"a list of {len(kinds)}", path)
        pairs = zip(kinds, values, strict=True)
        return tuple(self.read(kind, value, f"{path}[{index}]") for index, (kind, value) in enumerate(pairs))

    def _scalar(self, kind: Any, value: Any, path: str) -> Any:
        # JSON has one kind of number, and Python counts a truth value as one.
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            self._wrong(_NAMES[kind], path)
        if isinstance(value, int | float) and not (0 <= value < inf or (is_signed(path) and isfinite(value))):
            self._wrong("a finite number from 0 on", path)
        return value

    def _wrong(self, wanted: str, path: str) -> NoReturn:
        raise _no_report(f"{path or 'the whole'} is not {wanted}", self._where)


def is_signed(name: str) -> bool:
    """Whether a field's number may be below 0."""
    return any(word in name for word in SIGNED)


def required(kind: Any) -> list[str]:
    """The fields of a dataclass that a file must hold: those without a default."""
    return [
        each.name
        for each in fields(kind)
        if each.default is MISSING and each.default_factory is MISSING and (kind, each.name) not in ABSENT
    ]


def _no_report(why: str, where: str) -> UsageError:
    return UsageError(f"is no report of tilefit: {why}", where=where, hint=_HINT)
