"""What ranks of a program tell each other, each of which runs in a process of its own: files in a folder.

Only what the host must know goes this way: objects, and tensors as small as their values are kept.
"""

from __future__ import annotations

import io
import os
import pickle
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tilefit.errors import CaptureError
from tilefit.options import MOST_LINKED

#: As they were before a program's files went elsewhere.
_OPEN, _RENAME = open, os.rename
_POLL_S = 0.005
#: Files by which a rank is asked for, and told to have ended: followed by its number.
WANTED, ENDED = "wanted-", "ended-"


def ranks_of_machine(ranks: int) -> int:
    """How many of a program's ranks are on one machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", min(ranks, MOST_LINKED)))


class _Pickler(pickle.Pickler):
    """Of a tensor that lies on no memory the shape goes, as of those that pipelines' stages tell each other
    in PyTorch 2.11."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            return _on_meta, (tuple(obj.shape), obj.stride(), obj.dtype)
        return NotImplemented


def _on_meta(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


class Mail:
    """A rank's.

    Args:
        folder: Where all ranks have theirs.
        rank: Whose it is.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = os.fspath(folder), rank
        self._counts: Counter[str] = Counter()

    def want(self, rank: int) -> None:
        """Somebody is to run this rank, too."""
        if not self._counts[f"{WANTED}{rank}"]:
            self._write(f"{WANTED}{rank}", b"")
        self._counts[f"{WANTED}{rank}"] += 1

    def send(self, rank: int, content: Any) -> None:
        """Send something to a rank.

        Raises:
            CaptureError: it cannot be written.
        """
        self._post(f"{self._rank}-{rank}", content)

    def publish(self, group: str, content: Any) -> None:
        """Send something to all ranks of a group."""
        self._post(f"{self._rank}-all-{group}", content)

    def expect(self, rank: int, group: str = "") -> str:
        """The name of what comes next from a rank: to this one, or to all of a group."""
        return self._next(f"{rank}-all-{group}" if group else f"{rank}-{self._rank}")

    def receive(self, rank: int, name: str) -> Any:
        """What comes from a rank under a name, once it is there.

        Raises:
            CaptureError: the rank has ended without.
        """
        if rank == self._rank:
            raise CaptureError(f"rank {rank} waits for a message of its own, and has sent none")
        self.want(rank)
        while True:
            ended = self._read(f"{ENDED}{rank}")
            content = self._read(name)
            if content is not None:
                return pickle.loads(content)
            if ended is not None:
                raise CaptureError(
                    f"rank {self._rank} waits for a message of rank {rank}, which has none for it",
                    hint="Pipeline stages run as separate processes here, each to the same optimizer step.",
                )
            time.sleep(_POLL_S)

    def _next(self, way: str) -> str:
        self._counts[way] += 1
        return f"{way}-{self._counts[way]}"

    def _post(self, way: str, content: Any) -> None:
        try:
            file = io.BytesIO()
            _Pickler(file).dump(content)
        except Exception as error:
            raise CaptureError(
                f"what goes to another rank cannot be written: {type(error).__name__}: {error}"
            ) from error
        self._write(self._next(way), file.getvalue())

    def _write(self, name: str, data: bytes) -> None:
        path = os.path.join(self._folder, name)
        partial = f"{path}.{self._rank}"
        with _OPEN(partial, "wb") as file:
            file.write(data)
        _RENAME(partial, path)

    def _read(self, name: str) -> bytes | None:
        try:
            with _OPEN(os.path.join(self._folder, name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None
