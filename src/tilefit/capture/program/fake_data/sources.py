"""Where a program's data come from, which of it is missing, and what stood in for it."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any
from unittest.mock import patch

from tilefit.capture.packages import is_installed
from tilefit.capture.sites import short_path, user_frames, user_line
from tilefit.errors import TargetError, TilefitError

_FAKE_IT = "Put it there, or let random data of its shape take its place: --fake-data."
#: Of a library that a step does not need: for logging, plotting.
STAND_IN = "Install it, or let what does as good as nothing take its place: --fake-data."
#: How a connection is refused, before the name of the host.
NO_DOWNLOAD = "tilefit downloads nothing, also not from"
#: What to do where a source is missing and nobody knows what would be in it.
PUT_IT_THERE = "Put it there: what would be in it is unknown, so that --fake-data cannot make it up."


@dataclass(frozen=True, slots=True)
class Missing:
    """A source of data that is not there.

    Attributes:
        name: What it is, such as ``torchvision.datasets.MNIST`` or a file.
        line: The user's, that asked for it.
        remedy: What to do.
    """

    name: str
    line: str
    remedy: str


class Sources(ExitStack):
    """The sources that a program asks for while it runs.

    Args:
        found: Gets a text for each source that random data took the place of.
        fake: They take its place; otherwise a source that is missing is noted, and fails as it does.
    """

    def __init__(self, found: list[str], *, fake: bool) -> None:
        super().__init__()
        self.fake = fake
        self.found = found
        #: How often made-up data were handed out: what is timed with them is not what real data take.
        self.used = 0
        self.files_used: Callable[[], int] = lambda: 0
        #: Makes a file that is missing, if its name says what would be in it.
        self.make: Callable[[str], bool] = lambda path: False
        self._missing: list[Missing] = []

    @property
    def handed_out(self) -> int:
        """How often made-up data were handed out, files included."""
        return self.used + self.files_used()

    def note(self, name: str, remedy: str = _FAKE_IT) -> None:
        """A source is missing."""
        self._missing.append(Missing(name, user_line_now(), remedy))

    def state(self, name: str, what: str) -> None:
        """Random data ``what`` have taken the place of a source."""
        self.used += 1
        text = f"{name}: {what}"
        if text not in self.found:
            self.found.append(text)

    def explained(self, error: BaseException) -> TilefitError | None:
        """What to tell of an error that ended the program: that data are missing, if any are."""
        follows = isinstance(error, SystemExit | AssertionError) or (
            isinstance(error, Exception) and is_missing(error)
        )
        left = [each for each in self._missing if not self.fake or each.remedy not in (_FAKE_IT, STAND_IN)]
        if not follows:
            return None
        if left:
            last = left[-1]
            return TargetError(f"{last.name} is not there", where=last.line, hint=last.remedy)
        name = _asked_for(error)
        return (
            TargetError(f"{name} is not there", where=_own_line(error), hint=PUT_IT_THERE) if name else None
        )

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Let an attribute have another value until the end."""
        self.enter_context(patch.object(owner, name, value))

    def answer(
        self,
        owner: Any,
        name: str,
        label: Callable[..., str],
        stand_in: Callable[..., Any],
        *,
        when: Callable[..., bool] = lambda *args, **kwargs: True,
        lacks: Callable[..., bool] = lambda result, *args, **kwargs: False,
        beside: tuple[type[Exception], ...] | type[Exception] = (),
    ) -> None:
        """Answer a function of a library's where it fails because its data are missing.

        Args:
            owner, name: The module or class that has it.
            label: What to call the source, of the function's arguments.
            stand_in: Makes what is returned instead, of the function's arguments, and states it.
            when: Whether the call is one to answer, of its arguments.
            lacks: Whether what it returned was made without data, of that and its arguments.
            beside: What it raises where data are missing, beside what :func:`is_missing` knows.
        """
        static = owner.__dict__[name]
        is_method = isinstance(static, classmethod | staticmethod)
        original = static.__func__ if is_method else static

        @functools.wraps(original)
        def asked(*args: Any, **kwargs: Any) -> Any:
            try:
                result = original(*args, **kwargs)
                if not lacks(result, *args, **kwargs):
                    return result
                raise FileNotFoundError(f"{label(*args, **kwargs)}: no data")  # noqa: TRY301 - as others say it
            except Exception as error:
                if not (isinstance(error, beside) or is_missing(error)) or not when(*args, **kwargs):
                    raise
                self.note(label(*args, **kwargs))
                if not self.fake:
                    raise
            return stand_in(*args, **kwargs)

        self.replace(owner, name, type(static)(asked) if is_method else asked)


def _asked_for(error: BaseException) -> str:
    """The file that was not found, or what was to be fetched, according to an error or to those before it."""
    before: BaseException | None = error
    while before is not None:
        if isinstance(before, FileNotFoundError) and before.filename is not None:
            return os.fsdecode(before.filename) if not isinstance(before.filename, int) else ""
        if fetched := re.search(rf"{NO_DOWNLOAD} ([\w.-]+)", str(before)):
            return f"what the program fetches from {fetched[1]}"
        before = before.__cause__ or before.__context__
    return ""


def _own_line(error: BaseException) -> str:
    """``file:line`` of the user's own code that an error passed last."""
    own = [frame for frame in user_frames(error) if not is_installed(frame.filename)]
    return f"{short_path(own[-1].filename)}:{own[-1].lineno}" if own else user_line(error)


def is_missing(error: Exception) -> bool:
    """Whether an error says that data are not there and cannot be fetched.

    Files, connections and Hugging Face's hub raise an ``OSError``; torchvision a bare RuntimeError;
    transformers a ValueError of a tokenizer whose files are not there.
    """
    text = str(error).lower()
    return (
        isinstance(error, OSError | ImportError)
        or (isinstance(error, RuntimeError) and ("not found" in text or "download" in text))
        or (isinstance(error, ValueError) and ("connect" in text or "backend tokenizer" in text))
    )


# ---- who asks ----------------------------------------------------------------------------------


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _user_frame() -> FrameType | None:
    """The innermost frame of the user's code."""
    return next((each for each in _frames() if not is_installed(each.f_code.co_filename)), None)


def user_line_now() -> str:
    """``file:line`` of the user's code that is running; empty if none is."""
    frame = _user_frame()
    return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else ""


def user_source() -> str:
    """The file of the user's code that is running."""
    frame = _user_frame()
    return "".join(linecache.getlines(frame.f_code.co_filename)) if frame else ""


#: ``importlib.util`` and ``importlib.metadata``, files or frozen.
_LOOKS_AROUND = re.compile(r"importlib\W(util|metadata)\b")


def asked_by_user() -> bool:
    """Whether the user's code asks, itself or through Python's own library; not what looks for what is
    installed, to do without."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if not is_installed(file):
            return True
        if "-packages" in file or _LOOKS_AROUND.search(file):
            return False
    return False


def is_listed() -> bool:
    """Whether Python's own library asks, to list a folder for the user's code."""
    for frame in _frames():
        if not is_installed(frame.f_code.co_filename):
            return False
        if frame.f_code.co_name in ("glob", "rglob", "iterdir", "_select_from", "select_from"):
            return asked_by_user()
    return False


def is_prepared() -> bool:
    """Whether the user's code that is running stands in a ``try``: it knows what to do without."""
    frame = _user_frame()
    if frame is None:
        return False
    return any(
        start <= frame.f_lineno <= end for start, end in _tries(os.path.abspath(frame.f_code.co_filename))
    )


def is_required() -> bool:
    """Whether the user's code asserts what it asks."""
    frame = _user_frame()
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno) if frame else ""
    return re.match(r"\s*assert\s+(?!not\b)", line) is not None


@cache
def _tries(file: str) -> list[tuple[int, int]]:
    """First and last lines of the guarded parts of a file."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    return [
        (node.body[0].lineno, node.body[-1].end_lineno or 0)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and node.handlers
    ]
