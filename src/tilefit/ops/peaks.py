"""How a step's memory grows with its batch: the moments that can be its fullest."""

from __future__ import annotations

from collections.abc import Iterable

#: Bytes alive at one moment: those that stay whatever the batch, and those that grow with it.
Moment = tuple[int, int]


def fullest(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """Of the moments of a step, those that are its fullest on some batch, from the smallest batch on.

    At ``factor`` times the batch a moment holds ``stays + factor * grows`` bytes, a straight line; what is
    left is the upper envelope of the lines, so that a few moments stand for thousands.
    """
    most: dict[int, int] = {}
    for stays, grows in moments:
        most[grows] = max(most.get(grows, 0), stays)
    envelope: list[Moment] = []
    for grows, stays in sorted(most.items()):
        while envelope and _is_below(envelope, stays, grows):
            envelope.pop()
        envelope.append((stays, grows))
    return tuple(envelope)


def _is_below(envelope: list[Moment], stays: int, grows: int) -> bool:
    """Whether the last line is nowhere above both the one before it and a steeper one."""
    if envelope[-1][0] <= stays:
        return True
    if len(envelope) == 1:
        return False
    (flat_stays, flat_grows), (last_stays, last_grows) = envelope[-2:]
    # The steeper line overtakes the flat one no later than the last line does.
    return (flat_stays - stays) * (last_grows - flat_grows) <= (flat_stays - last_stays) * (
        grows - flat_grows
    )
