"""Reads traces in Chrome's JSON format, event by event, without holding the file in memory.

The format: "Trace Event Format" (Google), of which Kineto, PyTorch's profiler, writes complete events
(``"ph": "X"``) with times in microseconds.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from tilefit.errors import TilefitError

#: Characters read at once; an event that is longer is read whole.
_BLOCK = 1 << 22
#: An event longer than this many characters is taken for a file that is no trace.
_LONGEST_EVENT = 1 << 28
_SPACE = " \t\r\n"
_GZIP = b"\x1f\x8b"
_AGAIN = "Export the trace again; the program may have ended while writing it."

Event = dict[str, Any]


def read_events(path: Path, on_header: Callable[[str, Any], None] | None = None) -> Iterator[Event]:
    """Every event of a trace, in the order of the file.

    Args:
        path: A ``.json`` or ``.json.gz`` file: an object with ``traceEvents``, or the list of events alone.
        on_header: Told of every other field of the object, as it is met.

    Raises:
        TilefitError: the file cannot be read, is no trace, or ends in the middle of one.
    """
    try:
        with _opened(path) as file:
            yield from _Reader(file, path).events(on_header or (lambda name, value: None))
    except OSError as error:
        raise TilefitError(
            f"cannot be read: {error.strerror or error}", where=str(path), hint="Name a trace file."
        ) from error
    except (EOFError, zlib.error) as error:
        what = "the compressed trace is cut off or damaged"
        raise TilefitError(what, where=str(path), hint=_AGAIN) from error


def _opened(path: Path) -> IO[str]:
    with path.open("rb") as file:
        compressed = file.read(2) == _GZIP
    opener: Any = gzip.open if compressed else open
    file_: IO[str] = opener(path, "rt", encoding="utf-8", errors="replace")
    return file_


class _Reader:
    """Decodes one JSON value after the other from a text that arrives in blocks."""

    def __init__(self, file: IO[str], path: Path) -> None:
        self._file = file
        self._path = path
        self._text = ""
        self._at = 0
        self._before = 0  # characters of the file before ``_text``
        self._ended = False
        # Names of kernels and files may hold control characters.
        self._decode = json.JSONDecoder(strict=False).raw_decode

    def events(self, on_header: Callable[[str, Any], None]) -> Iterator[Event]:
        first = self._next()
        if first == "[":
            yield from self._list(may_end=True)
            return
        if first != "{":
            raise self._not_a_trace()
        found = False
        while self._peek() != "}":
            name = self._value()
            if not isinstance(name, str) or self._next() != ":":
                raise self._not_a_trace()
            if name == "traceEvents" and self._peek() == "[":
                found = True
                self._next()
                yield from self._list(may_end=False)
            else:
                on_header(name, self._value())
            if self._peek() == ",":
                self._next()
        if not found:
            raise self._not_a_trace()

    def _list(self, may_end: bool) -> Iterator[Event]:
        """Events up to the closing bracket, which the format lets a bare list do without."""
        while (mark := self._peek(may_end)) not in ("]", ""):
            if mark == ",":
                self._at += 1
                continue
            event = self._value()
            if not isinstance(event, dict):
                raise self._not_a_trace()
            yield event
        self._at += 1

    def _value(self) -> Any:
        """The next value, after reading as much as it takes."""
        self._peek()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except ValueError as error:
                if self._ended or len(self._text) - self._at > _LONGEST_EVENT:
                    why = "the file ends in the middle of a value" if self._ended else str(error)
                    what = f"not JSON around character {self._before + self._at}: {why}"
                    raise TilefitError(what, where=str(self._path), hint=_AGAIN) from error
            else:
                # A number at the end of the block may go on in the next one.
                if end < len(self._text) or self._ended:
                    self._at = end
                    return value
            self._more()

    def _next(self) -> str:
        mark = self._peek()
        self._at += 1
        return mark

    def _peek(self, may_end: bool = False) -> str:
        """The next character that is no white space; empty at the end of the file where that may be."""
        while True:
            text, at = self._text, self._at
            while at < len(text) and text[at] in _SPACE:
                at += 1
            self._at = at
            if at < len(text):
                return text[at]
            if self._ended:
                if may_end:
                    return ""
                if not self._before + at:
                    raise self._not_a_trace()
                raise TilefitError("the trace is cut off", where=str(self._path), hint=_AGAIN)
            self._more()

    def _more(self) -> None:
        block = self._file.read(_BLOCK)
        self._ended = not block
        self._before += self._at
        self._text = self._text[self._at :] + block
        self._at = 0

    def _not_a_trace(self) -> TilefitError:
        return TilefitError(
            "not a trace in Chrome's JSON format",
            where=str(self._path),
            hint="Name what torch.profiler's export_chrome_trace wrote.",
        )
