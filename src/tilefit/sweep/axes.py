"""What varies in a sweep, and through which values: ``--over batch=1..512``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilefit import gpus
from tilefit.errors import UsageError, near

Value = int | str

#: Settings of the step, with the values they may take.
SETTINGS: dict[str, tuple[str, ...]] = {
    "amp": ("bf16", "fp16", "off"),
    "dtype": ("fp32", "tf32", "bf16", "fp16"),
    "compile": ("off", "on"),
    "optimizer": ("adamw", "sgd", "none"),
    "fused_optimizer": ("off", "on"),
    "channels_last": ("off", "on"),
}
#: Ways to split the step over GPUs; their options are ``--tensor-parallel`` and so on.
SPLITS = ("tensor_parallel", "pipeline_parallel", "data_parallel", "micro_batches")
#: Axes along which the model, and the work for one sample, stay the same: only among those are throughput,
#: latency and memory worth weighing against each other.
SAME_MODEL = frozenset({"batch", *SETTINGS, *SPLITS})
#: A sweep has at most so many points.
MOST_POINTS = 5000

_RANGE = re.compile(r"(\d+)\.\.(\d+)(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class Axis:
    """One thing that varies.

    Attributes:
        name: ``batch``, ``seq``, ``image_size``; ``gpu``; one of :data:`SETTINGS` or :data:`SPLITS`; else a
            size of the model: an argument of its factory or an attribute of its configuration.
        values: In the order they were written, each once; of sizes increasing.
    """

    name: str
    values: tuple[Value, ...]

    @property
    def is_size(self) -> bool:
        """Whether its values are numbers."""
        return all(isinstance(value, int) for value in self.values)


def read_axes(texts: Iterable[str]) -> list[Axis]:
    """The axes that ``--over`` names.

    Raises:
        UsageError: a text is not of the form NAME=VALUES, a value is unknown, or a name is given twice.
    """
    axes: dict[str, Axis] = {}
    for text in texts:
        name, sign, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not sign or not name.isidentifier() or not values.strip():
            raise UsageError(
                f"cannot read --over {text}",
                hint="Write NAME=VALUES: --over batch=1..512, --over hidden=768,1024, --over gpu=h200,l4.",
            )
        if name in axes:
            raise UsageError(f"{name} varies twice", hint=f"Write one --over {name}=… with all its values.")
        axes[name] = read_axis(name, values)
    return list(axes.values())


def read_axis(name: str, text: str, option: str = "") -> Axis:
    """The axis of a name, through the values of a comma-separated list.

    ``option`` is what messages say that they were given by; empty for ``--over NAME``.
    """
    option = option or f"--over {name}"
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise UsageError("no value is given", where=option, hint="Write one or more: 8,16,32.")
    if name == "gpu":
        return Axis(name, tuple(dict.fromkeys(gpus.get(item).name for item in items)))
    if name in SETTINGS:
        for item in items:
            if item not in SETTINGS[name]:
                raise UsageError(
                    f"{name} cannot be {item!r}",
                    where=option,
                    hint=near(item, SETTINGS[name], f"Use: {', '.join(SETTINGS[name])}."),
                )
        return Axis(name, tuple(dict.fromkeys(items)))
    return Axis(name, tuple(sorted({size for item in items for size in _sizes(option, item)})))


def points(axes: Sequence[Axis]) -> int:
    """How many points the grid of axes has.

    Raises:
        UsageError: more than :data:`MOST_POINTS`.
    """
    count = 1
    for axis in axes:
        count *= len(axis.values)
    if count > MOST_POINTS:
        sizes = " x ".join(f"{len(axis.values)} of {axis.name}" for axis in axes)
        raise UsageError(
            f"{sizes} are {count:,} points, more than {MOST_POINTS:,}",
            hint="Give a range a step, or fewer values: --over batch=1..512 takes the powers of two.",
        )
    return count


def _sizes(option: str, item: str) -> Sequence[int]:
    """``512`` as itself; ``1..512`` as its ends and the powers of two between; ``1..512:8`` as the first and
    the multiples of 8."""
    if item.isascii() and item.isdigit() and int(item):
        return [int(item)]
    match = _RANGE.fullmatch(item)
    if match is None or not all(int(part) for part in match.groups() if part):
        raise UsageError(
            f"{item!r} is neither a size nor a range",
            where=option,
            hint="Write a number from 1 on, FIRST..LAST (its powers of two), or FIRST..LAST:STEP.",
        )
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise UsageError(f"the range {item} is reversed", where=option, hint=f"Write {last}..{first}.")
    if match[3]:
        step = int(match[3])
        if (last - first) // step > MOST_POINTS:
            raise UsageError(
                f"{item} has more than {MOST_POINTS:,} sizes", where=option, hint="Take a larger step."
            )
        return [first, *range((first // step + 1) * step, last + 1, step)]
    powers = (1 << exponent for exponent in range(first.bit_length(), last.bit_length()))
    return [first, *powers, last]
