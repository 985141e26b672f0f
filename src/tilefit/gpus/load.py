"""Read the files of GPUs."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, TypeVar

from tilefit.errors import TilefitError
from tilefit.gpus.gpu import Gpu

#: Where the files are: a TOML for each kind of multiprocessor (SM), with what its GPUs share, and with them.
DATA = Path(__file__).parent / "data"

_DTYPES = frozenset({"fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8"})
# What a product is called needs no document to quote.
_UNSOURCED = frozenset({"title", "aliases", "source", "sources"})

_EXPECTED: dict[type, str] = {
    str: "a text",
    int: "a positive integer",
    float: "a positive number with a decimal point",
    list: "a list",
    dict: "a table",
}

_Value = TypeVar("_Value")


def load(path: Path) -> list[tuple[Gpu, tuple[str, ...]]]:
    """The GPUs a file describes, each with its other names.

    Raises:
        TilefitError: the file is not TOML, lacks a field or the source of one, has a field nobody knows, or
            a value is not what its field needs; the error names the file, the GPU and the field.
    """
    try:
        root = _Table(tomllib.loads(path.read_text("utf-8")), path.name)
    except tomllib.TOMLDecodeError as error:
        raise TilefitError(f"not TOML: {error}", where=path.name) from error
    gpus = root.table("gpus")
    fields = root.values.keys() - _UNSOURCED
    sources = root.table("sources")
    shared = {
        "architecture": root.take("architecture", str),
        "compute_capability": root.version("compute_capability"),
        "shared_memory_bytes_per_sm": root.take("shared_memory_bytes_per_sm", int),
        "flop_per_clock_per_sm": root.rates("flop_per_clock_per_sm", int, required=("fp32", "fp64")),
        "sources": {key: sources.take(key, str) for key in fields - {"architecture"}},
    }
    for table in (root, sources):
        table.finish()
    return [
        _gpu(name, _Table(gpus.take(name, dict), f"{path.name} [{name}]"), shared) for name in [*gpus.values]
    ]


def _gpu(name: str, root: _Table, shared: dict[str, Any]) -> tuple[Gpu, tuple[str, ...]]:
    # Each field is from the GPU's one source, if ``sources`` does not name another.
    sources = dict.fromkeys(sorted(root.values.keys() - _UNSOURCED), root.take("source", str))
    own_sources, own_rates, own_clocks, link = map(
        root.optional, ("sources", "flop_per_clock_per_sm", "clock_hz", "link")
    )
    sources |= {key: own_sources.take(key, str) for key in sources if key in own_sources.values}
    datasheet = root.table("datasheet")
    bus_width_bits = root.take("memory_bus_width_bits", int)
    data_rate_bits_per_s = root.take("memory_data_rate_bits_per_s", float)
    facts = shared | {
        "flop_per_clock_per_sm": shared["flop_per_clock_per_sm"] | own_rates.by_dtype(int),
        "sources": shared["sources"] | sources,
    }
    gpu = Gpu(
        name=name,
        title=root.take("title", str),
        sms=root.take("sms", int),
        boost_clock_hz=root.take("boost_clock_hz", float),
        memory_bytes=root.take("memory_bytes", int),
        memory_bandwidth_bytes_per_s=bus_width_bits * data_rate_bits_per_s / 8,
        l2_bytes=root.take("l2_bytes", int),
        memory_bus_width_bits=bus_width_bits,
        memory_data_rate_bits_per_s=data_rate_bits_per_s,
        link=link.take("name", str) if link.values else "",
        link_bandwidth_bytes_per_s=link.take("bandwidth_bytes_per_s", float) if link.values else 0.0,
        clock_hz_by_dtype=own_clocks.by_dtype(float),
        datasheet_peak_flop_per_s=datasheet.rates("peak_flop_per_s", float, required=("fp32",)),
        datasheet_bandwidth_bytes_per_s=datasheet.take("memory_bandwidth_bytes_per_s", float),
        **facts,
    )
    aliases = root.texts("aliases")
    for table in (root, datasheet, own_sources, link):
        table.finish()
    return gpu, aliases


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

    def optional(self, key: str) -> _Table:
        """A table that may be absent, which is an empty one."""
        return self.table(key) if key in self.values else _Table({}, self.where)

    def rates(self, key: str, kind: type[_Value], required: tuple[str, ...]) -> dict[str, _Value]:
        return self.table(key).by_dtype(kind, required)

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
