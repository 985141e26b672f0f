"""Processes of this machine that do the same thing together: one for each GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from tilefit.errors import TilefitError

#: Until all have imported torch and found each other.
_START_S = 120.0


class Ranks:
    """So many processes in one process group; to be used in a ``with`` statement, which ends them.

    Args:
        count: How many.
        device: ``cuda``, each with a GPU of its own and NCCL; or ``cpu``, with gloo.
    """

    def __init__(self, count: int, device: str = "cuda") -> None:
        self.count, self.device = count, device
        self._processes: list[Any] = []
        self._ends: list[Connection] = []

    def __enter__(self) -> Ranks:
        from torch import multiprocessing
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # The store is this process's: it stays when they end.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(self.count):
                ours, theirs = context.Pipe()
                args = rank, self.count, self.device, self._store.port, theirs
                process = context.Process(target=_serve, args=args, daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._ends.append(ours)
            self._answers(_START_S)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the processes, whatever they do."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._ends = [], []

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """What ``function(*args)`` returns in each process, called in all at once.

        Args:
            function: A module's function; it finds its rank in :mod:`torch.distributed`.
            args: Sent to each.
            timeout_s: After which they are ended.

        Raises:
            TilefitError: one has failed, or they took too long. All are ended then, as the others may wait
                for it for ever.
        """
        if not self._ends:
            raise TilefitError("the processes have ended")
        try:
            for end in self._ends:
                end.send((function, args))
            return self._answers(timeout_s)
        except BaseException:
            self.stop()
            raise

    def _answers(self, timeout_s: float) -> list[Any]:
        until_s = time.monotonic() + timeout_s
        found: dict[int, Any] = {}
        while len(found) < self.count:
            waiting = [end for rank, end in enumerate(self._ends) if rank not in found]
            ready = wait(waiting, max(0.0, until_s - time.monotonic()))
            if not ready:
                silent = [rank for rank in range(self.count) if rank not in found]
                raise TilefitError(f"no answer within {timeout_s:g} s of rank {', '.join(map(str, silent))}")
            for rank, end in enumerate(self._ends):
                if end not in ready:
                    continue
                try:
                    failed, found[rank] = end.recv()
                except EOFError:
                    failed, found[rank] = True, "the process has ended"
                if failed:
                    raise TilefitError(f"rank {rank}: {found[rank]}")
        return [found[rank] for rank in range(self.count)]


def _serve(rank: int, count: int, device: str, port: int, end: Connection) -> None:
    """What a process does: calls functions until its parent is gone."""
    try:
        import torch
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore("127.0.0.1", port, is_master=False)
        options: dict[str, Any] = {"store": store, "rank": rank, "world_size": count}
        if device == "cuda":
            torch.cuda.set_device(rank)
            options["device_id"] = torch.device("cuda", rank)
        else:
            torch.set_num_threads(1)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=_START_S), **options)
        end.send((False, None))
        while True:
            function, args = end.recv()
            end.send((False, function(*args)))
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001  # the parent says what it was
        end.send((True, f"{type(error).__name__}: {error}"))
