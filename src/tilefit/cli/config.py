"""``[tool.tilefit]`` of the nearest ``pyproject.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilefit.errors import UsageError, near
from tilefit.options import Selection


@dataclass(frozen=True, slots=True)
class Config:
    """What a project has settled for itself; an option on the command line goes before it.

    Attributes:
        gpu: GPUs to check for.
        select, ignore: Codes of rules or their beginnings.
        min_gain: Smallest gain worth a finding, as a share of the step; None where not set.
        per_module_ignores: Codes not to report, by pattern of module path.
    """

    gpu: tuple[str, ...] = ()
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    min_gain: float | None = None
    per_module_ignores: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def selection(self, given: Selection) -> Selection:
        """Which findings are wanted: what the command line says, else what is settled here."""
        return Selection(
            given.select or self.select,
            (*self.ignore, *given.ignore),
            self.min_gain if given.min_gain is None else given.min_gain,
            self.per_module_ignores,
        )


def load(start: Path) -> Config:
    """The configuration that holds in a directory: of the nearest ``pyproject.toml`` at or above it.

    Raises:
        UsageError: the file is not TOML, or its ``[tool.tilefit]`` says something unknown.
    """
    start = start.resolve()
    for folder in (start, *start.parents):
        path = folder / "pyproject.toml"
        if path.is_file():
            return parse(path)
    return Config()


def parse(path: Path) -> Config:
    """The configuration in one file."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path)) from error
    reader = _Reader(f"{path}, [tool.tilefit]")
    table = reader.table("tool", document.get("tool", {})).get("tilefit", {})
    readers = {
        "gpu": reader.strings,
        "select": reader.strings,
        "ignore": reader.strings,
        "min-gain": reader.gain,
        "per-module-ignores": reader.strings_by_name,
    }
    values: dict[str, Any] = {}
    for key, value in reader.table("tool.tilefit", table).items():
        if key not in readers:
            hint = near(key, readers, f"The keys are {', '.join(readers)}.")
            raise UsageError(f"unknown key {key!r}", where=reader.where, hint=hint)
        values[key.replace("-", "_")] = readers[key](key, value)
    return Config(**values)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads values of the wanted shape, or says which key has another."""

    where: str

    def strings(self, key: str, value: Any) -> tuple[str, ...]:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
            raise self._wrong(key, "a string or a list of strings")
        return tuple(values)

    def gain(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self._wrong(key, "a share of the step between 0 and 1")
        return float(value)

    def strings_by_name(self, key: str, value: Any) -> dict[str, tuple[str, ...]]:
        return {
            name: self.strings(f"{key}.{name!r}", codes) for name, codes in self.table(key, value).items()
        }

    def table(self, key: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._wrong(key, "a table")
        return value

    def _wrong(self, key: str, wanted: str) -> UsageError:
        return UsageError(f"{key} must be {wanted}", where=self.where)
