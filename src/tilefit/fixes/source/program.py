"""The files of the user's program."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tilefit.capture.packages import is_installed
from tilefit.fixes.changes.fix import refuse
from tilefit.fixes.source.file import SourceFile
from tilefit.fixes.source.syntax import Syntax
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
        self._syntaxes: dict[Path, Syntax] = {}

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

    def syntax(self, path: str | Path) -> Syntax:
        """A file, parsed.

        Raises:
            RefusedError: it is not the user's to change, or cannot be read or parsed.
        """
        resolved = Path(path).resolve()
        refuse(is_installed(str(resolved)), f"{resolved.name} belongs to an installed package")
        refuse(not self._is_own(resolved), f"{os.path.relpath(resolved)} lies outside the project")
        if resolved not in self._syntaxes:
            self._syntaxes[resolved] = Syntax(SourceFile.read(resolved))
        return self._syntaxes[resolved]

    def syntaxes(self) -> Iterator[Syntax]:
        """All of them, the main one first."""
        return (self.syntax(path) for path in self._named if path.is_file() and self._is_own(path))

    def _is_own(self, path: Path) -> bool:
        """Whether a file is the user's to change: no package's, in the main one's folder or this one."""
        folders = (self.main.parent, Path.cwd().resolve())
        return not is_installed(str(path)) and any(path.is_relative_to(folder) for folder in folders)
