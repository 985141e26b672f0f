"""What ways to hold less would give a plan: on its best split, on one like it that then fits, or at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tilefit.parallel.choices import TrainingSplit
from tilefit.parallel.memory_choices import CHOICES, EITHER, MemoryChoice, Thrifty
from tilefit.parallel.planning import Planner, Priced
from tilefit.rules.finding import SAFE

#: Share of a GPU's memory that a way must free, or of the step that it must spare, to be told.
_LEAST = 0.01


@dataclass(frozen=True, slots=True)
class Offer:
    """A split with ways to hold less.

    Attributes:
        choices: These, beside those that were asked for.
        priced: The split with them.
        host_bytes: What each GPU then keeps in its host's memory.
    """

    choices: tuple[MemoryChoice, ...]
    priced: Priced
    host_bytes: float

    @property
    def level(self) -> str:
        """That of the choice that changes most."""
        return next((each.level for each in self.choices if each.level != SAFE), SAFE)


def offers(planner: Planner, gpus: int, best: Priced | None) -> tuple[Offer, ...]:
    """What every way to hold less would give.

    Args:
        planner: With what was asked for.
        gpus: How many.
        best: The fastest split that fits; None where none does: then those ways are told by which one does,
            each alone, or together where none does alone.
    """
    ways: list[tuple[MemoryChoice, ...]] = [(each,) for each in CHOICES if _is_new(planner.job.choices, each)]
    if best is None:
        found = list(_fitting(planner, gpus, ways))
        together = [tuple(each for each in _together(planner.job.choices, level)) for level in (True, False)]
        return tuple(found or next(filter(None, ([*_fitting(planner, gpus, [way])] for way in together)), ()))
    sizes = _sizes(best.split)
    alike = [split for split in planner.splits(gpus) if _sizes(split) == sizes]
    return tuple(offer for way in ways for offer in _on(planner, way, best, alike))


def _is_new(made: Iterable[str], choice: MemoryChoice) -> bool:
    return not any(each == choice.name or {each, choice.name} in map(set, EITHER) for each in made)


def _together(made: Iterable[str], safe: bool) -> Iterator[MemoryChoice]:
    """All that can be made together, of two ways to do one thing the second; if ``safe`` no others."""
    for choice in CHOICES:
        first_of_two = choice.name in [first for first, _ in EITHER]
        if _is_new(made, choice) and not first_of_two and (choice.level == SAFE or not safe):
            yield choice


def _sizes(split: TrainingSplit) -> tuple[int, ...]:
    return split.tensor, split.pipeline, split.data, split.context


def _with(planner: Planner, way: tuple[MemoryChoice, ...]) -> Planner:
    job = replace(planner.job, choices=(*planner.job.choices, *(each.name for each in way)))
    return replace(planner, job=job)


def _offer(planner: Planner, way: tuple[MemoryChoice, ...], priced: Priced) -> Offer:
    training = planner.training(priced.split)
    return Offer(way, priced, training.host_bytes() if isinstance(training, Thrifty) else 0.0)


def _on(
    planner: Planner, way: tuple[MemoryChoice, ...], best: Priced, alike: list[TrainingSplit]
) -> Iterator[Offer]:
    """A way on the best split, where it frees something; and on the fastest split of the same sizes, where it
    makes one fit that is faster."""
    other = _with(planner, way)
    same = other.priced(best.split)
    if best.memory.total - same.memory.total >= _LEAST * planner.usable_bytes:
        yield _offer(other, way, same)
    for faster in other.ranked(alike, 1):
        if faster.split != best.split and faster.time.time_s < (1 - _LEAST) * best.time.time_s:
            yield _offer(other, way, faster)


def _fitting(planner: Planner, gpus: int, ways: list[tuple[MemoryChoice, ...]]) -> Iterator[Offer]:
    """The ways by which a split fits, with the fastest."""
    for way in ways:
        other = _with(planner, way)
        for priced in other.best(gpus, 1) if way else ():
            yield _offer(other, way, priced)
