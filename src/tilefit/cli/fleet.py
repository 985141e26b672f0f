"""``--ray``: the cluster that a command works on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilefit.session.fleet import Fleet

RAY = "Work on a cluster that Ray runs: its address, or auto for the one that this machine belongs to."


def fleet_at(address: str | None) -> AbstractContextManager[Fleet | None]:
    """The cluster at an address; None where none is asked for.

    Raises:
        TilefitError: there is no such cluster, or Ray is not installed.
    """
    if address is None:
        return nullcontext()
    from tilefit.session.fleet import Fleet

    return Fleet(address)
