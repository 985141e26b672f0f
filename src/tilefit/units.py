"""Quantities as people write them. Everywhere else they are SI numbers."""

from __future__ import annotations

from math import floor, log10

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"))


def number(value: float) -> str:
    """Three significant digits, without an exponent: ``0.0123``, ``1.23``, ``123``, ``12,300``."""
    if not value:
        return "0"
    decimals = 2 - floor(log10(abs(value)))
    rounded = round(value, decimals)
    # Rounding may carry into another digit (9.996 -> 10.0), which then needs one decimal less.
    decimals = 2 - floor(log10(abs(rounded)))
    return f"{rounded:,.{max(0, decimals)}f}"


def seconds(value: float) -> str:
    """``148 ms``, ``12.3 µs``."""
    scale, unit = _time_unit(value)
    return f"{number(value / scale)} {unit}"


def interval(low_s: float, high_s: float) -> str:
    """Two times in the unit of the larger: ``120 to 176 ms``."""
    scale, unit = _time_unit(max(low_s, high_s, key=abs))
    return f"{number(low_s / scale)} to {number(high_s / scale)} {unit}"


def share(value: float) -> str:
    """A fraction in per cent: ``16.4 %``, ``0.3 %``; below a tenth of a per cent ``<0.1 %``."""
    percent = 100 * value
    if 0 < percent < 0.1:
        return "<0.1 %"
    # What is not all must not look like all.
    if 99.9 <= percent < 100:
        return "99.9 %"
    return f"{percent:.0f} %" if percent in (0, 100) else f"{percent:.1f} %"


def size(value: float) -> str:
    """Bytes moved, with a decimal prefix: ``31.2 GB``."""
    return _prefixed(value, "B")


def capacity(value: float) -> str:
    """Bytes held, with a binary prefix, as memories are built and sold: ``141 GiB``."""
    scale, prefix = next((pair for pair in _BINARY if value >= 0.9995 * pair[0]), (1.0, ""))
    return f"{number(value / scale)} {prefix}B"


def rate(flop_per_s: float) -> str:
    """``412 TFLOP/s``."""
    return _prefixed(flop_per_s, "FLOP/s")


def flop(value: float) -> str:
    """``14.3 TFLOP``."""
    return _prefixed(value, "FLOP")


def count(value: int) -> str:
    """A whole number of things with a prefix from a million on: ``124 M``, ``1,482``."""
    return f"{value:,}" if value < 1_000_000 else _prefixed(value, "").rstrip()


def counted(many: int, noun: str) -> str:
    """``1 row``, ``1,482 rows``."""
    return f"{many:,} {noun}{'s' * (many != 1)}"


def _time_unit(value: float) -> tuple[float, str]:
    # 0.9995 rounds to 1.00, so the larger unit starts a little below itself.
    return next((pair for pair in _TIMES if abs(value) >= 0.9995 * pair[0]), _TIMES[-1])


def _prefixed(value: float, unit: str) -> str:
    scale, prefix = next((pair for pair in _PREFIXES if abs(value) >= 0.9995 * pair[0]), (1.0, ""))
    return f"{number(value / scale)} {prefix}{unit}"
