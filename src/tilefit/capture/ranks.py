"""Ranks of a program that answer another one's messages: each runs in a child process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tilefit.capture.results import read
from tilefit.capture.worker import Worker
from tilefit.emulation.mail import ENDED, WANTED
from tilefit.errors import CaptureError, TilefitError

#: So many run at most: each has PyTorch and its part of the model in memory. A choice.
MOST_RANKS = 16


class Ranks:
    """The ranks that are asked for while a program runs.

    Args:
        own: The rank that is looked at, which has a process already.
        mail: The folder in which they are asked for.
        start: Starts the process of a rank.
        result: Name of the file that a process leaves.
    """

    def __init__(
        self,
        own: int,
        mail: Path,
        start: Callable[[int], Worker],
        result: str,
    ) -> None:
        self._own, self._mail, self._start, self._result = own, mail, start, result
        self.workers: dict[int, Worker] = {}
        self._ended: set[int] = set()

    def look(self) -> None:
        """Start who is asked for, and tell of who has ended.

        Raises:
            CaptureError: there would be too many, or one died.
            TilefitError: one of them failed.
        """
        for path in self._mail.glob(f"{WANTED}*"):
            number = path.name.removeprefix(WANTED)
            if not number.isdigit() or int(number) in (self._own, *self.workers):
                continue
            if len(self.workers) + 1 >= MOST_RANKS:
                raise CaptureError(
                    f"its ranks exchange messages with more than {MOST_RANKS} others",
                    hint=f"Check it with fewer stages: each of them runs, and {MOST_RANKS} can.",
                )
            self.workers[int(number)] = self._start(int(number))
        for rank, worker in self._running().items():
            text = worker.found(self._result, f"rank {rank}")
            if text is None:
                continue
            result = read(text)
            if isinstance(result, TilefitError):
                result.what = f"rank {rank}: {result.what}"
                raise result
            self._ended.add(rank)
            (self._mail / f"{ENDED}{rank}").touch()

    def _running(self) -> dict[int, Worker]:
        return {rank: worker for rank, worker in self.workers.items() if rank not in self._ended}

    def lines(self) -> str:
        """What those are at that run, as the end of a sentence."""
        running = self._running().items()
        return "".join(f"; rank {rank} is at {worker.line(asks=True) or '?'}" for rank, worker in running)

    def own_ended(self) -> None:
        """The rank that is looked at needs nobody any more."""
        (self._mail / f"{ENDED}{self._own}").touch()
