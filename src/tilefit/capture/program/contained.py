"""What stands around a program that is run to see a step of it."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import numpy

from tilefit.capture.program.fake_data import Sources, fake_data
from tilefit.capture.program.loaders import Loaders
from tilefit.capture.sites import user_line
from tilefit.capture.torchvision_import import tolerated
from tilefit.errors import TargetError, TilefitError


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What was seen around a program.

    Attributes:
        loaders: Its data loaders.
        sources: Its sources of data.
    """

    loaders: Loaders
    sources: Sources

    def explained(self, error: BaseException) -> TilefitError | None:
        """What to tell of an error that ended the program, where its surroundings are the cause."""
        if isinstance(error, EOFError):
            return TargetError(
                "the program reads from standard input, where there is nothing",
                where=user_line(error),
                hint="Give it what it asks for by its own arguments, after --.",
            )
        return self.sources.explained(error)


class _Nothing(io.TextIOBase):
    """Standard input that nobody gave anything, and that says so to who reads it."""

    def _asked(self, *args: Any) -> NoReturn:
        raise EOFError("standard input")

    read = readline = readlines = __next__ = _asked

    @property
    def buffer(self) -> _Nothing:
        """Its bytes."""
        return self


@contextmanager
def contained(folder: Path, *, fake: bool = False) -> Iterator[Surroundings]:
    """Within the block a program runs without a network and writes no files of the user's.

    Args:
        folder: Where its files go; exists, and is deleted by who made it.
        fake: Random data take the place of data that are missing.
    """
    random.seed(0)  # two runs of a program are compared; PyTorch's own generator begins the same anyway
    numpy.random.seed(0)
    with (
        patch.object(sys, "stdin", _Nothing()),
        tolerated(),
        fake_data([], folder, fake=fake) as sources,
        Loaders(lambda: sources.handed_out, sources.found).watching() as loaders,
    ):
        yield Surroundings(loaders, sources)
