"""The sizes of ``tilefit curve``: one of them is a range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tilefit.errors import UsageError

if TYPE_CHECKING:
    from tilefit.cost.curve import Sizes


def read_sizes(given: Mapping[str, str], over: str | None, *, of_step: bool = False) -> Sizes:
    """Reads sizes, of which one varies: through fewer values where each is a whole step.

    Raises:
        UsageError: a size is no size or range, or not exactly one varies.
    """
    from tilefit.cost.curve import DENSITY, STEP_DENSITY, Sizes, sizes_between

    read = {name: _range(name, text) for name, text in given.items()}
    varying = {name for name, numbers in read.items() if len(numbers) > 1} or {over} - {None}
    if len(varying) != 1:
        raise UsageError(
            f"several sizes are ranges: {', '.join(sorted(filter(None, varying)))}"
            if varying
            else "no size varies",
            hint="Write the one that varies as FIRST:LAST, such as 1:512, and the others as numbers.",
        )
    (name,) = varying
    if over not in (None, name):
        raise UsageError(f"{name} is a range, but --over says {over}", hint=f"Leave out --over {over}.")
    assert name is not None
    numbers = read[name] if len(read[name]) > 1 else (1, *read[name])
    fixed = {other: values[0] for other, values in read.items() if other != name}
    step = numbers[2] if len(numbers) == 3 else None
    values = sizes_between(numbers[0], numbers[1], step, STEP_DENSITY if of_step else DENSITY)
    return Sizes(name, values, fixed)


def _range(name: str, text: str) -> tuple[int, ...]:
    """``512`` as (512,), ``1:512:8`` as (1, 512, 8)."""
    parts = text.split(":")
    numbers = tuple(int(part) for part in parts if part.isascii() and part.isdigit())
    if len(numbers) < len(parts) or len(parts) > 3 or not all(numbers):
        raise UsageError(
            f"{text!r} is neither a size nor a range",
            where=name,
            hint="Write a number from 1 on, FIRST:LAST or FIRST:LAST:STEP, such as 50257 or 50200:50400:8.",
        )
    return numbers
