"""The steps of a target while one size varies."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from tilefit.capture.child import captures_in_child
from tilefit.cost.fusion import fuse
from tilefit.errors import TargetError, TilefitError
from tilefit.ops import Step
from tilefit.ops.interpolation import CAPTURES, StepAt, interpolate
from tilefit.ops.scaling import scale_batch
from tilefit.options import AnyOptions, ProgramOptions

#: Sizes of the inputs and of the embedding: any value is as good as another, so that captures can be
#: interpolated. Other sizes are captured one by one: a model may refuse some of them.
SMOOTH = ("batch", "seq", "vocab")
#: More captures than this are thinned out.
MOST_CAPTURES = 48
#: A capture that was not interpolated may differ from the interpolated step by this share of its work, and of
#: its memory, whose peak is not always at the same place of the step.
_TOLERANCE = 0.005
_MEMORY_TOLERANCE = 0.05

#: Runs captures; :func:`~tilefit.capture.child.captures_in_child`, or something quicker in tests.
Capture = Callable[[str, Sequence[AnyOptions], float], Generator[Step | TilefitError]]
#: Shows progress: an iterable and its length in, the same items out.
Watch = Callable[[Iterable[Any], int], Iterable[Any]]


@dataclass
class StepsBySize:
    """What is known of a target's steps.

    Attributes:
        at: The step at a size, with the fusion of the compiler where that is asked for.
        sizes: The sizes there is a step for, increasing.
        everywhere: ``at`` knows any other size too.
        failed: What could not be captured, and why.
        interrupted: The user stopped it before all sizes were captured.
        notes: What a reader must know about it.
    """

    at: StepAt
    sizes: tuple[int, ...]
    everywhere: bool = False
    failed: dict[int, TilefitError] = field(default_factory=dict)
    interrupted: bool = False
    notes: tuple[str, ...] = ()


def capture_sizes(
    target: str,
    options: AnyOptions,
    over: str,
    sizes: Sequence[int],
    timeout_s: float,
    *,
    watch: Watch = lambda items, total: items,
    capture: Capture = captures_in_child,
) -> StepsBySize:
    """Capture a target at as many sizes as it takes to know all of them.

    Four captures tell whether the step can be interpolated: three fix the polynomials, the fourth checks
    them. Where it cannot, because another size runs other operations or changes the model, every size is
    captured.

    Args:
        target: As of ``tilefit check``.
        options: How to capture it. A program whose arguments do not say where the size goes runs once.
        over: ``batch``, ``seq``, ``image_size``, or a size of the constructor.
        sizes: Values of that size, increasing.
        timeout_s: How long one capture may take.
        watch: Shows the progress of captures.
        capture: Runs them.

    Raises:
        TilefitError: no size can be captured, or the target does not depend on it.
    """

    found: dict[int, Step] = {}
    failed: dict[int, TilefitError] = {}

    def run(wanted: Sequence[int]) -> None:
        missing = [size for size in wanted if size not in found and size not in failed]
        if not missing:
            return
        with closing(
            capture(target, [options.at_size(over, size) for size in missing], timeout_s)
        ) as captures:
            for size, captured in zip(missing, watch(captures, len(missing)), strict=True):
                if isinstance(captured, TilefitError):
                    failed[size] = captured
                else:
                    found[size] = captured

    if not options.takes(over):
        with closing(capture(target, [options], timeout_s)) as captures:
            return _unmoved(target, options, over, sizes, *watch(captures, 1))
    wanted, chosen = sizes[:: -(-len(sizes) // MOST_CAPTURES)], _chosen(over, sizes)
    if chosen:
        run(chosen)
        varied = not failed and not _is_constant(found)
        if varied and (between := _interpolated(found, chosen[-1])):
            # A dimension of size 1 spares copies that every larger one needs.
            run([size for size in sizes if size == 1])
            known = tuple(size for size in sizes if size not in failed)
            return StepsBySize(_compiled(lambda size: found.get(size) or between(size)), known, True, failed)
    interrupted = not _is_constant(found) and _is_interrupted(lambda: run(wanted), found)
    if not found:
        raise next(iter(failed.values()))
    if _is_constant(found):
        return _unmoved(target, options, over, sizes, next(iter(found.values())))
    notes = [f"{len(wanted)} of {len(sizes)} sizes were captured."] if len(wanted) < len(sizes) else []
    at = _compiled(found.__getitem__)
    return StepsBySize(at, tuple(sorted(found)), False, failed, interrupted, tuple(notes))


def _is_interrupted(run: Callable[[], None], found: dict[int, Step]) -> bool:
    """Whether Ctrl-C came while it ran, and there is something to show."""
    try:
        run()
    except KeyboardInterrupt:
        if not found:
            raise
        return True
    return False


def _compiled(at: StepAt) -> StepAt:
    """The step as the compiler would run it, where that is asked for."""

    def fused(size: int) -> Step:
        step = at(size)
        return fuse(step) if step.settings.compiled else step

    return fused


def _is_constant(found: dict[int, Step]) -> bool:
    """Whether all captures are the same step."""
    return len(found) > 1 and len({(step.inputs, step.ops) for step in found.values()}) == 1


def first_captures(options: AnyOptions, over: str, sizes: Sequence[int]) -> list[AnyOptions]:
    """The captures that :func:`capture_sizes` begins with, in its order; mostly they are all it needs."""
    if not options.takes(over):
        return [options]
    chosen = _chosen(over, sizes)
    ones = [size for size in sizes if size == 1]
    wanted = [*chosen, *ones] if chosen else sizes[:: -(-len(sizes) // MOST_CAPTURES)]
    return [options.at_size(over, size) for size in wanted]


def _chosen(over: str, sizes: Sequence[int]) -> list[int]:
    """Between which the step is interpolated: the ends and the middle; last, to check them, the least even of
    the others. Nothing where that would not pay, or not hold."""
    sizes = [size for size in sizes if size > 1]
    if over not in SMOOTH or len(sizes) <= CAPTURES + 1:
        return []
    ends = [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    others = [size for size in sizes[len(sizes) // 2 :] if size not in ends]
    return [*ends, min(others, key=lambda size: size & -size)]


def _interpolated(found: dict[int, Step], check: int) -> StepAt | None:
    at = interpolate({size: step for size, step in found.items() if size != check})
    if at is None:
        return None
    expected, real = at(check), found[check]
    if [type(each.op) for each in expected.ops] != [type(each.op) for each in real.ops]:
        return None
    pairs = [
        (expected.flop, real.flop, _TOLERANCE),
        (_moved_bytes(expected), _moved_bytes(real), _TOLERANCE),
        (expected.memory.peak_bytes, real.memory.peak_bytes, _MEMORY_TOLERANCE),
    ]
    return at if all(abs(a - b) <= most * b for a, b, most in pairs) else None


def _moved_bytes(step: Step) -> int:
    return sum(entry.op.moved_bytes for entry in step.ops)


def _unmoved(
    target: str, options: AnyOptions, over: str, sizes: Sequence[int], step: Step | TilefitError
) -> StepsBySize:
    """The target makes its own inputs. Only their batch can be varied from outside."""
    if isinstance(step, TilefitError):
        raise step
    note = f"The inputs of {target} are given: the step was captured with {step.batch} samples and scaled."
    if isinstance(options, ProgramOptions):
        options.require_places({over} - {"batch"})
        if options.takes(over):
            raise TargetError(
                f"the step of {target} is the same whatever {{{over}}} in its arguments is",
                hint="Name the argument that changes it.",
            )
        note = (
            f"{target} ran once, and its step of {step.batch} samples was scaled; what else changes "
            "with them was not seen. With {batch} where its arguments say how many, it runs with others."
        )
    if over == "batch" and step.batch and not step.ranks:
        at = _compiled(lambda size: scale_batch(step, size / step.batch))
        return StepsBySize(at, tuple(sizes), everywhere=True, notes=(note,))
    raise TargetError(
        f"{target} does not depend on {over}: its inputs are {', '.join(step.inputs) or 'its own'}",
        hint="Vary a size it takes: the batch, or a size of the model itself.",
    )
