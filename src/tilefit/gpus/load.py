"""Read the file of one GPU."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from tilefit.errors import TilefitError
from tilefit.gpus.gpu import Gpu

#: Where the files are: one TOML each, its name the name users type.
DATA = Path(__file__).parent / "data"

_MULTIPROCESSORS = Path(__file__).parent / "multiprocessors.toml"
_DTYPES = frozenset({"fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8"})
# What a product is called needs no document to quote.
_UNSOURCED = frozenset({"title", "aliases", "multiprocessor", "source", "sources"})

_EXPECTED: dict[type, str] = {
    str: "a text",
    int: "a positive integer",
    float: "a positive number with a decimal point",
    list: "a list",
    dict: "a table",
}

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class _Multiprocessor:
    """What GPUs with the same kind of SM share; the fields are those of :class:`~tilefit.gpus.gpu.Gpu`."""

    architecture: str
    compute_capability: tuple[int, int]
    shared_memory_bytes_per_sm: int
    flop_per_clock_per_sm: dict[str, int]
    sources: dict[str, str]


def load(path: Path) -> tuple[Gpu, tuple[str, ...]]:
    """The GPU a file describes, and its other names.

    Raises:
        TilefitError: the file is not TOML, lacks a field or the source of one, has a field nobody knows, or
            a value is not what its field needs; the error names the file and the field.
    """
    root = _read(path)
    # Each field is from the GPU's one source, if ``sources`` does not name another.
    sources = dict.fromkeys(sorted(root.values.keys() - _UNSOURCED), root.take("source", str))
    own_sources = root.table("sources") if "sources" in root.values else None
    if own_sources:
        sources |= {key: own_sources.take(key, str) for key in sources if key in own_sources.values}
    multiprocessor = _multiprocessor(root)
    own_rates = root.table("flop_per_clock_per_sm") if "flop_per_clock_per_sm" in root.values else None
    datasheet = root.table("datasheet")
    link = root.table("link") if "link" in root.values else None
    bus_width_bits = root.take("memory_bus_width_bits", int)
    data_rate_bits_per_s = root.take("memory_data_rate_bits_per_s", float)
    gpu = Gpu(
        name=path.stem,
        title=root.take("title", str),
        architecture=multiprocessor.architecture,
        compute_capability=multiprocessor.compute_capability,
        sms=root.take("sms", int),
        boost_clock_hz=root.take("boost_clock_hz", float),
        flop_per_clock_per_sm=multiprocessor.flop_per_clock_per_sm
        | (own_rates.by_dtype(int) if own_rates else {}),
        memory_bytes=root.take("memory_bytes", int),
        memory_bandwidth_bytes_per_s=bus_width_bits * data_rate_bits_per_s / 8,
        l2_bytes=root.take("l2_bytes", int),
        shared_memory_bytes_per_sm=multiprocessor.shared_memory_bytes_per_sm,
        memory_bus_width_bits=bus_width_bits,
        memory_data_rate_bits_per_s=data_rate_bits_per_s,
        link=link.take("name", str) if link else "",
        link_bandwidth_bytes_per_s=link.take("bandwidth_bytes_per_s", float) if link else 0.0,
        clock_hz_by_dtype=root.table("clock_hz").by_dtype(float) if "clock_hz" in root.values else {},
        datasheet_peak_flop_per_s=datasheet.table("peak_flop_per_s").by_dtype(float, required=("fp32",)),
        datasheet_bandwidth_bytes_per_s=datasheet.take("memory_bandwidth_bytes_per_s", float),
        sources=multiprocessor.sources | sources,
    )
    aliases = root.texts("aliases")
    for table in (root, datasheet, own_sources, link):
        if table:
            table.finish()
    return gpu, aliases


def _read(path: Path) -> _Table:
    try:
        return _Table(tomllib.loads(path.read_text("utf-8")), path.name)
    except tomllib.TOMLDecodeError as error:
        raise TilefitError(f"not TOML: {error}", where=path.name) from error


def _multiprocessor(root: _Table) -> _Multiprocessor:
    """That of a GPU whose file is read."""
    name, known = root.take("multiprocessor", str), _multiprocessors()
    if name not in known:
        raise TilefitError(
            f"multiprocessor must be one of {', '.join(known)}, not {name!r}", where=root.where
        )
    return known[name]


@cache
def _multiprocessors() -> dict[str, _Multiprocessor]:
    root = _read(_MULTIPROCESSORS)
    source = root.take("source", str)
    found = {}
    for name in list(root.values):
        table = root.table(name)
        found[name] = _Multiprocessor(
            table.take("architecture", str),
            table.version("compute_capability"),
            table.take("shared_memory_bytes_per_sm", int),
            table.table("flop_per_clock_per_sm").by_dtype(int, required=("fp32", "fp64")),
            {
                "compute_capability": source,
                "shared_memory_bytes_per_sm": source,
                "flop_per_clock_per_sm": table.take("source", str),
            },
        )
        table.finish()
    return found


class _Table:
    """A TOML table whose fields are taken one by one, each checked."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def take(self, key: str, kind: type[_Value]) -> _Value:
        """The value of a field, which must be there, of this type and, if a number, positive."""
        if key not in self.values:
            raise TilefitError(f"lacks {key}", where=self.where)
        value = self.values.pop(key)
        # Not isinstance: true is an int to it, but not to a reader. Zero and empty say nothing.
        if type(value) is not kind or not value or (isinstance(value, int | float) and value < 0):
            expected = _EXPECTED[kind]
            raise TilefitError(f"{key} must be {expected}, not {value!r}", where=self.where)
        return value

    def table(self, key: str) -> _Table:
        values: dict[str, Any] = self.take(key, dict)
        return _Table(values, f"{self.where} [{key}]")

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts that may be absent."""
        match self.values.pop(key, []):
            case list() as items if all(isinstance(item, str) for item in items):
                return tuple(items)
            case other:
                raise TilefitError(f"{key} must be a list of texts, not {other!r}", where=self.where)

    def version(self, key: str) -> tuple[int, int]:
        match self.take(key, list):
            case [int() as major, int() as minor]:
                return major, minor
            case other:
                raise TilefitError(f"{key} must be [major, minor], not {other!r}", where=self.where)

    def by_dtype(self, kind: type[_Value], required: tuple[str, ...] = ()) -> dict[str, _Value]:
        """All values of a table whose keys are element types."""
        keys = dict.fromkeys((*self.values, *required))
        found = {key: self.take(key, kind) for key in keys if key in _DTYPES}
        self.finish()
        return found

    def finish(self) -> None:
        if self.values:
            raise TilefitError(f"unknown field {min(self.values)}", where=self.where)
