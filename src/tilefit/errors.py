"""Errors meant for the person at the keyboard: what was wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


class TilefitError(Exception):
    """Something the user can act on; the command line prints it and exits with status 2.

    Args:
        what: What was wrong, as a sentence without a final stop.
        where: The file, line, option or module it was found at, if known.
        hint: What to do about it, as an imperative sentence.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what = what
        self.where = where
        self.hint = hint
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  {self.hint}" if self.hint else text


class UsageError(TilefitError):
    """An option, a name or an input specification cannot be understood."""


class TargetError(TilefitError):
    """The model cannot be found, imported or built."""


class CaptureError(TilefitError):
    """The step cannot be captured as asked, and a wrong step must not be reported instead."""


def near(word: str, known: Collection[str], otherwise: str = "") -> str:
    """The hint for a word that is not known: the one it is spelled like, or what to say ``otherwise``."""
    found = get_close_matches(word, known, 1)
    return f"Did you mean {found[0]}?" if found else otherwise
