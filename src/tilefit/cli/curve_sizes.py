"""The sizes of ``tilefit curve``: one of them is a range."""

from __future__ import annotations

from collections.abc import Mapping

from tilefit.errors import UsageError
from tilefit.options import Sizes

#: How dense the sizes of a range are: sampled evenly when there are more, and so many per doubling at least.
DENSITY = (512, 64)
#: For a whole step, which takes a hundred times as long to price.
STEP_DENSITY = (256, 16)
#: More sizes than this are refused: their prices would take minutes.
_LARGEST_RANGE = 20_000


def read_sizes(given: Mapping[str, str], over: str | None, *, of_step: bool = False) -> Sizes:
    """Reads sizes, of which one varies: through fewer values where each is a whole step.

    Raises:
        UsageError: a size is no size or range, or not exactly one varies.
    """
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


def sizes_between(
    first: int, last: int, step: int | None = None, density: tuple[int, int] = DENSITY
) -> tuple[int, ...]:
    """The sizes of a range to look at: the first, and the multiples of a step up to the last.

    Without a step all of them where they are few; else multiples of a power of two that grows with the size,
    so that a range over many doublings shows each of them.

    Raises:
        UsageError: the range is reversed, or its step makes too many sizes of it.
    """
    if last < first:
        raise UsageError(
            f"the range {first}:{last} is reversed", hint=f"Write the smaller size first: {last}:{first}."
        )
    if step is not None and (last - first) // step > _LARGEST_RANGE:
        raise UsageError(
            f"{first}:{last}:{step} has more than {_LARGEST_RANGE:,} sizes",
            hint=f"Take a larger step, or leave it out: {first}:{last}.",
        )
    if step is not None:
        return (first, *range((first // step + 1) * step, last + 1, step))
    most, per_doubling = density
    widest = 1 << ((last - first) // most).bit_length()
    sizes = [first]
    while True:
        densest = (1 << sizes[-1].bit_length() - 1) // per_doubling
        stride = max(1, min(widest, densest))
        size = (sizes[-1] // stride + 1) * stride
        if size > last:
            return tuple(sizes)
        sizes.append(size)


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
