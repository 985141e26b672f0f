"""A source file as it was read: edits, the diff they make, and writing them."""

from __future__ import annotations

import difflib
import io
import os
import re
import shutil
import tempfile
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tilefit.errors import UsageError
from tilefit.fixes.changes.fix import RefusedError, refuse

_NEWLINE = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """Characters ``start`` to ``stop`` of a text become ``text``; an insertion where they are equal."""

    start: int
    stop: int
    text: str


@dataclass(frozen=True)
class SourceFile:
    """A Python file as it was when it was read.

    Attributes:
        path: Where it lies, links resolved.
        data: Its bytes.
        encoding: By its byte order mark or coding comment, as Python reads it.
        text: What the bytes say, line ends as they are.
    """

    path: Path
    data: bytes
    encoding: str
    text: str

    @classmethod
    def read(cls, path: Path) -> SourceFile:
        """The file as it is now.

        Raises:
            RefusedError: it cannot be read, or not be written back byte for byte.
        """
        path = path.resolve()
        try:
            data = path.read_bytes()
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            text = data.decode(encoding)
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise RefusedError(f"{path} cannot be read ({error})") from error
        refuse(text.encode(encoding) != data, f"{path} cannot be written back byte for byte in {encoding}")
        return cls(path, data, encoding, text)

    @property
    def name(self) -> str:
        """The path as people refer to it: relative to here."""
        return os.path.relpath(self.path)

    @cached_property
    def line_starts(self) -> tuple[int, ...]:
        """Offset of each line in the text."""
        return (0, *(match.end() for match in _NEWLINE.finditer(self.text)))

    def offset(self, line: int, column: int) -> int:
        """Offset of a position; lines count from 1, columns (in characters) from 0."""
        return self.line_starts[line - 1] + column

    def line_of(self, offset: int) -> int:
        """The line, counted from 1, that an offset lies on."""
        return sum(start <= offset for start in self.line_starts)

    def line(self, number: int) -> str:
        """A line without its end; lines count from 1."""
        ends = (*self.line_starts[1:], len(self.text))
        return self.text[self.line_starts[number - 1] : ends[number - 1]].rstrip("\r\n")

    def newline_after(self, offset: int) -> str:
        """How the line of an offset ends; the last line as the one before it."""
        match = _NEWLINE.search(self.text, offset) or _NEWLINE.search(self.text)
        return match.group() if match else "\n"

    def with_edits(self, edits: Iterable[Edit]) -> str:
        """The text with edits made; equal ones once, insertions at one place in the order given.

        Raises:
            RefusedError: two edits change the same characters.
        """
        pieces, done = [], 0
        for edit in sorted(dict.fromkeys(edits), key=lambda edit: (edit.start, edit.stop)):
            refuse(edit.start < done, f"two changes meet in line {self.line_of(edit.start)} of {self.name}")
            pieces += [self.text[done : edit.start], edit.text]
            done = edit.stop
        return "".join([*pieces, self.text[done:]])

    def diff(self, text: str) -> bytes:
        """What turns the file into ``text``, as a unified diff in the file's own encoding."""
        name = Path(self.name).as_posix().encode()
        lines = difflib.diff_bytes(
            difflib.unified_diff,
            _lines(self.data),
            _lines(text.encode(self.encoding)),
            b"a/" + name,
            b"b/" + name,
            lineterm=b"\n",
        )
        return b"".join(
            line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines
        )

    def require_unchanged(self) -> None:
        """Refuse to go on where the file is not as it was read.

        Raises:
            UsageError: it is not.
        """
        if self.path.read_bytes() != self.data:
            raise UsageError(
                "changed while tilefit looked at it, and was left alone",
                where=self.name,
                hint="Run tilefit fix again.",
            )

    def write(self, text: str) -> None:
        """Replace the file by ``text``, whole or not at all.

        Raises:
            UsageError: it is not as it was read, or cannot be written.
        """
        try:
            self.require_unchanged()
            if not os.access(self.path, os.W_OK):
                raise UsageError("is read-only, and was left alone", where=self.name)
            with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=".tilefit-", delete=False) as file:
                try:
                    file.write(text.encode(self.encoding))
                    file.flush()
                    os.fsync(file.fileno())
                    shutil.copymode(self.path, file.name)
                    os.replace(file.name, self.path)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            raise UsageError(f"cannot be written: {error.strerror}", where=self.name) from error


def _lines(data: bytes) -> list[bytes]:
    """The lines as a diff counts them: each up to a line feed, which it keeps."""
    return re.findall(rb"[^\n]*\n|[^\n]+", data)
