"""The files of the user's program, and what is in the lines that were seen when it ran."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tilefit.capture.packages import is_installed
from tilefit.fixes.changes.fix import RefusedError, refuse
from tilefit.fixes.source.file import SourceFile, called
from tilefit.ops import Step


class Files:
    """The files of a program's that are the user's to change.

    Args:
        main: The one that is run, or that the target is in.
        named: Others that are known of.
        built_at: The line that builds the model of a target that is one, ``train.py:30``; empty if none does.
    """

    def __init__(self, main: Path, named: Iterable[Path] = (), built_at: str = "") -> None:
        self.main = main.resolve()
        self.built_at = built_at
        self._named = dict.fromkeys((self.main, *(path.resolve() for path in named)))
        self._read: dict[Path, SourceFile] = {}

    @classmethod
    def of(cls, step: Step, main: Path) -> Files:
        """Those that a step was seen in."""
        program = step.program
        lines = [*(entry.site.source for entry in step.ops), *(event.site.source for event in program.events)]
        lines += [*program.optimizers, *(loader.source for loader in program.loaders), *step.made.values()]
        lines += [call.rpartition(":")[0] for each in program.models for call in (each.call, each.beside)]
        names = dict.fromkeys(line.rpartition(":")[0] for line in lines)
        built_at = "" if program.calls_models else step.made.get("", "")
        return cls(main, map(Path, filter(None, names)), built_at)

    def all(self) -> Iterator[SourceFile]:
        """All of them, the main one first."""
        return (self.file(path) for path in self._named if path.is_file() and self._is_own(path))

    def file(self, path: Path) -> SourceFile:
        """A file as it was when it was first asked for.

        Raises:
            RefusedError: it is not the user's to change, or cannot be read.
        """
        path = path.resolve()
        refuse(is_installed(str(path)), f"{path.name} belongs to an installed package")
        refuse(not self._is_own(path), f"{os.path.relpath(path)} lies outside the project")
        if path not in self._read:
            self._read[path] = SourceFile.read(path)
        return self._read[path]

    def _is_own(self, path: Path) -> bool:
        """Whether a file is the user's to change: no package's, in the main one's folder or this one."""
        folders = (self.main.parent, Path.cwd().resolve())
        return not is_installed(str(path)) and any(path.is_relative_to(folder) for folder in folders)

    # ---- places ----------------------------------------------------------------------------

    def line_at(self, source: str) -> tuple[SourceFile, int]:
        """The file and the line of ``train.py:41``.

        Raises:
            RefusedError: it is not the user's to change.
        """
        name, _, line = source.rpartition(":")
        refuse(not name, "which line makes, calls or trains it is not known: none was run")
        refuse(not Path(name).is_file(), f"{source} is no file of yours")
        return self.file(Path(name)), int(line)

    def calls_of(self, sources: Iterable[str], *names: str) -> list[tuple[SourceFile, ast.Call]]:
        """The calls of functions or methods of some names in lines such as ``train.py:41``, each with its
        file."""
        lines = [self.line_at(source) for source in dict.fromkeys(sources)]
        calls = ((file, call) for file, line in lines for call in file.on_line(ast.Call, line))
        return [(file, call) for file, call in calls if called(call) in names]

    def call_at(self, source: str) -> tuple[SourceFile, ast.Call]:
        """The file and the call that ends at ``train.py:41:17``, as Python's bytecode gives it: the column is
        of bytes.

        Raises:
            RefusedError: it is not the user's to change, or not there.
        """
        source, _, column = source.rpartition(":")
        file, line = self.line_at(source)
        for call in file.on_line(ast.Call, line):
            if (call.end_lineno, call.end_col_offset) == (line, int(column)):
                return file, call
        raise RefusedError(f"the model's call is not found in line {line} of {file.name}")
