"""Work on a cluster of machines, by Ray: tasks go to whoever is free, and again to others where one dies."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import redirect_stdout
from typing import Any

from tilefit import units
from tilefit.capture.cache import versions
from tilefit.errors import TilefitError, UsageError

#: How often a task is begun again whose worker or machine has died.
_RETRIES = 5


class Fleet:
    """A cluster that Ray runs; to be used in a ``with`` statement.

    Args:
        address: Of the cluster, as of ``ray.init``; ``auto`` for the one that this machine belongs to.

    Raises:
        TilefitError: Ray is not installed, or there is no such cluster.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise UsageError(
                "a cluster needs Ray, which is not installed", where="--ray", hint="Run: pip install ray."
            ) from error
        self._ray: Any = ray
        # Ray tells of machines that die where data belong.
        self._aside = redirect_stdout(sys.stderr)
        self._ours = not ray.is_initialized()
        if not self._ours:
            return
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise TilefitError(
                f"there is no cluster at {address}: {str(error).splitlines()[0]}",
                where="--ray",
                hint="Start one: ray start --head, and on each other machine ray start --address=HEAD:6379.",
            ) from error

    def __enter__(self) -> Fleet:
        self._aside.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._ours:
            self._ray.shutdown()
        self._aside.__exit__(None, None, None)

    @property
    def cores(self) -> int:
        """How many tasks are done at once; at least one, as machines may yet come."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    @property
    def size(self) -> str:
        """How many machines and cores there are now."""
        alive = sum(node["Alive"] for node in self._ray.nodes())
        return f"{units.counted(alive, 'machine')}, {units.counted(self.cores, 'core')}"

    def map(
        self, function: Callable[..., Any], common: Any, items: Sequence[Any]
    ) -> Generator[tuple[int, Any]]:
        """``function(common, item)`` for each item, with the item's place; what is done first comes first.

        Args:
            function: A module's function; it runs in this one's working directory.
            common: What all of them need; it is sent to each machine once.
            items: What each of them is given.

        Raises:
            TilefitError: one could not be done, whatever machine it was tried on.
        """
        ray = self._ray
        remote = ray.remote(num_cpus=1, max_retries=_RETRIES)(_on_worker)
        shared = ray.put(common)
        about = os.getcwd(), _versions()
        places = {remote.remote(function, about, shared, item): place for place, item in enumerate(items)}
        try:
            while places:
                (done,), _ = ray.wait(list(places), num_returns=1)
                place = places.pop(done)
                try:
                    made = ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                except ray.exceptions.RayError as error:
                    raise TilefitError(
                        f"no machine of the cluster could do a part of it: {error}", where="--ray"
                    ) from error
                yield place, made
        finally:
            for left in places:
                ray.cancel(left, force=True)


def _on_worker(function: Callable[..., Any], about: tuple[str, str], common: Any, item: Any) -> Any:
    """Run on a machine of the cluster.

    Raises:
        TilefitError: its numbers would not be those of the machine that asks.
    """
    folder, asked = about
    try:
        os.chdir(folder)
    except OSError as error:
        raise TilefitError(
            f"a machine of the cluster has no folder {folder}",
            where=os.uname().nodename,
            hint="Run it in a folder that all machines share.",
        ) from error
    if (here := _versions()) != asked:
        raise TilefitError(
            f"a machine of the cluster has {here}, and this one {asked}",
            where=os.uname().nodename,
            hint="Install the same versions everywhere.",
        )
    return function(common, item)


def _versions() -> str:
    return ", ".join(versions(())[1:])
