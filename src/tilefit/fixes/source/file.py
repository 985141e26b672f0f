"""A source file as it was read: where its nodes are, what its names mean; its diff, and writing it."""

from __future__ import annotations

import ast
import difflib
import io
import os
import re
import shutil
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from tilefit.errors import UsageError
from tilefit.fixes.changes.fix import RefusedError, refuse

_NEWLINE = re.compile(r"\r\n|\r|\n")
#: A node that has a place.
Placed = ast.stmt | ast.expr | ast.keyword | ast.arg | ast.alias
Node = TypeVar("Node", bound=Placed)
#: What has names of its own, beside the file.
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True, eq=False)
class SourceFile:
    """A Python file as it was when it was read.

    Attributes:
        path: Where it lies, links resolved.
        data: Its bytes.
        encoding: By its byte order mark or coding comment, as Python reads it.
        text: What the bytes say, line ends as they are.
        tree: The text, parsed.
    """

    path: Path
    data: bytes
    encoding: str
    text: str
    tree: ast.Module

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
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError) as error:
            raise RefusedError(f"{path} cannot be read ({error})") from error
        refuse(text.encode(encoding) != data, f"{path} cannot be written back byte for byte in {encoding}")
        return cls(path, data, encoding, text, tree)

    @property
    def name(self) -> str:
        """The path as people refer to it: relative to here."""
        return os.path.relpath(self.path)

    # ---- places ----------------------------------------------------------------------------

    @cached_property
    def lines(self) -> list[str]:
        """The lines with their ends, as Python counts them."""
        return io.StringIO(self.text, newline="").readlines()

    def offset(self, line: int, column: int) -> int:
        """Offset in the text of a place as Python gives it: lines count from 1, columns are of UTF-8."""
        return len("".join(self.lines[: line - 1])) + len(self.lines[line - 1].encode()[:column].decode())

    def start(self, node: Placed) -> int:
        """Offset of a node's first character."""
        return self.offset(node.lineno, node.col_offset)

    def stop(self, node: Placed) -> int:
        """Offset behind a node's last character."""
        return self.offset(last_line(node), node.end_col_offset or 0)

    def where(self, node: Placed) -> str:
        """File and line, for a message: ``train.py:12``."""
        return f"{self.name}:{node.lineno}"

    def indentation(self, line: int) -> str:
        """What a line begins with."""
        text = self.lines[line - 1].rstrip("\r\n")
        return text[: len(text) - len(text.lstrip())]

    def new_line(self, node: Placed) -> str:
        """A line's end, as the first one is, and the indentation of a node's line."""
        end = _NEWLINE.search(self.text)
        return (end.group() if end else "\n") + self.indentation(node.lineno)

    # ---- nodes -----------------------------------------------------------------------------

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node around each node."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def all(self, *kinds: type[Node]) -> Iterator[Node]:
        """All nodes of some kinds, the outer ones first."""
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))

    def on_line(self, kind: type[Node], line: int) -> list[Node]:
        """The nodes of a kind that a line is a part of; those in f-strings have no place in Python 3.11."""
        found = (node for node in self.all(kind) if node.lineno <= line <= last_line(node))
        return [node for node in found if not any(self.around(node, ast.JoinedStr))]

    def around(self, node: ast.AST, *kinds: type[Node]) -> Iterator[Node]:
        """The nodes of some kinds around a node, the innermost first."""
        while node is not self.tree:
            node = self.parents[node]
            if isinstance(node, kinds):
                yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """The statement around a node.

        Raises:
            RefusedError: it does not begin the line, or holds others.
        """
        statement = next(self.around(node, ast.stmt))
        is_simple = sum(isinstance(each, ast.stmt) for each in ast.walk(statement)) == 1
        is_own = is_simple and statement.col_offset == len(self.indentation(statement.lineno))
        refuse(not is_own, f"line {statement.lineno} of {self.name} is no statement of its own")
        return statement

    def onward(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements of a block from one of them on."""
        blocks = (value for _, value in ast.iter_fields(self.parents[statement]) if isinstance(value, list))
        block = next(block for block in blocks if statement in block)
        return block[block.index(statement) :]

    def bindings(self, target: ast.expr) -> list[Placed]:
        """Where a name, or an attribute that is written so, gets its value (imports, parameters,
        assignments), in the order of the file."""
        nodes = self.all(ast.Name, ast.Attribute, ast.arg, ast.alias)
        bound = sorted((each for each in nodes if _bound(each) == ast.unparse(target)), key=self.start)
        if not isinstance(target, ast.Name):
            return bound
        own = ([each for each in bound if scope in self._scopes(each)[:1]] for scope in self._scopes(target))
        return next(filter(None, own), [])

    def _scopes(self, node: ast.AST) -> list[ast.AST]:
        """What has names of its own around a node, the innermost first, the file last."""
        return [*self.around(node, *_FUNCTIONS, *_COMPREHENSIONS), self.tree]

    # ---- edits ---------------------------------------------------------------------------

    def replaced(self, node: Placed, text: str) -> Edit:
        """The edit that writes ``text`` in a node's place."""
        return Edit(self, self.start(node), self.stop(node), text)

    def before(self, statement: ast.stmt, line: str) -> Edit:
        """The edit that writes a line before a statement, indented as it is."""
        return Edit(self, self.start(statement), self.start(statement), line + self.new_line(statement))

    def behind(self, statement: ast.stmt, line: str) -> Edit:
        """The edit that writes a line behind a statement, indented as it is."""
        on_line = (each for each in self.onward(statement) if each.lineno <= last_line(statement))
        number = max(map(last_line, on_line))
        at = self.offset(number, 0) + len(self.lines[number - 1].rstrip("\r\n"))
        return Edit(self, at, at, self.new_line(statement) + line)

    def with_edits(self, edits: Iterable[Edit]) -> str:
        """The text with edits made; equal ones once, insertions at one place in the order given.

        Raises:
            RefusedError: two edits change the same characters.
        """
        pieces, done = [], 0
        for edit in sorted(dict.fromkeys(edits), key=lambda edit: (edit.start, edit.stop)):
            refuse(edit.start < done, f"two changes meet in line {edit.line} of {self.name}")
            pieces += [self.text[done : edit.start], edit.text]
            done = edit.stop
        return "".join([*pieces, self.text[done:]])

    def diff(self, text: str) -> bytes:
        """What turns the file into ``text``, as a unified diff in the file's own encoding."""
        name = Path(self.name).as_posix().encode()
        # As a diff counts them, lines end at line feeds alone.
        old, new = (io.BytesIO(data).readlines() for data in (self.data, text.encode(self.encoding)))
        lines = difflib.diff_bytes(difflib.unified_diff, old, new, b"a/" + name, b"b/" + name)
        return b"".join(
            line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines
        )

    def require_writable(self) -> None:
        """Refuse to go on where the file is not as it was read, or must not be written.

        Raises:
            UsageError: it is so.
        """
        if not self.path.is_file() or self.path.read_bytes() != self.data:
            raise UsageError(
                "changed while tilefit looked at it, and was left alone",
                where=self.name,
                hint="Run tilefit fix again.",
            )
        if not os.access(self.path, os.W_OK):
            raise UsageError("is read-only, and was left alone", where=self.name)

    def write(self, text: str) -> None:
        """Replace the file by ``text``, whole or not at all.

        Raises:
            UsageError: it is not as it was read, or cannot be written.
        """
        try:
            self.require_writable()
            with tempfile.TemporaryDirectory(dir=self.path.parent, prefix=".tilefit-") as folder:
                new = Path(folder, self.path.name)
                with new.open("wb") as file:
                    file.write(text.encode(self.encoding))
                    file.flush()
                    os.fsync(file.fileno())
                shutil.copymode(self.path, new)
                os.replace(new, self.path)
        except OSError as error:
            raise UsageError(f"cannot be written: {error.strerror}", where=self.name) from error


@dataclass(frozen=True, slots=True)
class Edit:
    """Characters ``start`` to ``stop`` of a file become ``text``; an insertion where they are equal."""

    file: SourceFile
    start: int
    stop: int
    text: str

    @property
    def line(self) -> int:
        """The line, counted from 1, in which the text begins."""
        blank = self.text[: len(self.text) - len(self.text.lstrip())]
        return len(_NEWLINE.split(self.file.text[: self.start] + blank))


def last_line(node: Placed) -> int:
    """The line a node ends on."""
    return node.end_lineno or node.lineno


def names(*within: ast.AST, of: type[ast.expr_context] = ast.expr_context) -> set[str]:
    """All names that nodes contain; ``ast.Store``: those that are given a value."""
    found = (node for each in within for node in ast.walk(each) if isinstance(node, ast.Name))
    return {node.id for node in found if isinstance(node.ctx, of)}


def called(call: ast.Call) -> str:
    """The name of the function or method that is called, without what stands before it."""
    return ast.unparse(call.func).rpartition(".")[2]


def _bound(node: Placed) -> str:
    """The name or attribute that a node gives a value; empty where it gives none."""
    match node:
        case ast.arg(arg=name) | ast.alias(asname=str(name)) | ast.alias(name=name):
            return name
        case ast.Name(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
            return ast.unparse(node)
    return ""
