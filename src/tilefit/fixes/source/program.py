"""The user's program: its files, and what was seen of it when it ran."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tilefit.capture import capture
from tilefit.capture.naming import has_source
from tilefit.capture.packages import is_installed
from tilefit.capture.sites import Made, SiteTracker, called, made_at, noting_makers
from tilefit.capture.targets import Target, load
from tilefit.fixes.changes.fix import refuse
from tilefit.fixes.source.file import SourceFile
from tilefit.fixes.source.syntax import Syntax
from tilefit.ops import Program, Step
from tilefit.options import TargetOptions


class Files:
    """The files of a program's that are the user's to change.

    Args:
        main: The one that is run, or that the target is in.
        named: Others that are known of.
    """

    #: The user's line that builds the model of a target that is one, ``train.py:30``; empty if none does.
    built_at = ""

    def __init__(self, main: Path, named: Iterable[Path] = ()) -> None:
        self.main = main
        self._named = tuple(named)
        self._syntaxes: dict[Path, Syntax] = {}

    @classmethod
    def of(cls, step: Step, main: Path) -> Files:
        """Those that a program's step was seen in."""
        program = step.program
        lines = [*(entry.site.source for entry in step.ops), *(event.site.source for event in program.events)]
        lines += [*program.optimizers, *(loader.source for loader in program.loaders)]
        lines += [call.rpartition(":")[0] for each in program.models for call in (each.call, each.beside)]
        return cls(main, [Path(name) for line in dict.fromkeys(lines) if (name := line.rpartition(":")[0])])

    def seen(self, step: Step) -> Program:
        """Where things are in the files as they are; ``step``: of them as they are."""
        return step.program

    def syntax(self, path: str | Path) -> Syntax:
        """A file, parsed.

        Raises:
            RefusedError: it cannot be read or parsed.
        """
        resolved = Path(path).resolve()
        if resolved not in self._syntaxes:
            self._syntaxes[resolved] = Syntax(SourceFile.read(resolved))
        return self._syntaxes[resolved]

    def own_syntax(self, path: str | Path) -> Syntax:
        """A file that is the user's to change, parsed.

        Raises:
            RefusedError: it is not, or cannot be read or parsed.
        """
        resolved = Path(path).resolve()
        refuse(is_installed(str(resolved)), f"{resolved.name} belongs to an installed package")
        refuse(not self._is_own(resolved), f"{os.path.relpath(resolved)} lies outside the project")
        return self.syntax(resolved)

    def syntaxes(self) -> Iterator[Syntax]:
        """All of them, the main one first."""
        yield self.syntax(self.main)
        for path in self._named:
            resolved = path.resolve()
            if resolved != self.main and resolved.is_file() and self._is_own(resolved):
                yield self.syntax(resolved)

    def _is_own(self, path: Path) -> bool:
        """Whether a file is the user's to change: no package's, in the main one's folder or this one."""
        folders = (self.main.parent, Path.cwd().resolve())
        return not is_installed(str(path)) and any(path.is_relative_to(folder) for folder in folders)


class Loaded(Files):
    """A target that is a model or a function, loaded; a function runs once.

    Attributes:
        target: The model and its inputs.
        models: The models that ran, by what the paths of their modules begin with.

    Args:
        name: As the user typed it.
        options: How it is loaded.
    """

    def __init__(self, name: str, options: TargetOptions) -> None:
        self.models: dict[str, nn.Module] = {}
        self._optimizers: list[Made] = []
        self._calls: list[tuple[nn.Module, str]] = []
        self._sites = SiteTracker(self._found, lambda: None)
        made = torch.optim.Optimizer.__init__

        def noted(optimizer: torch.optim.Optimizer, *args: Any, **keywords: Any) -> None:
            made(optimizer, *args, **keywords)
            self._optimizers.append(self._sites.made_here())

        with noting_makers(), patch.object(torch.optim.Optimizer, "__init__", noted):
            self.target: Target = load(name, options)
            model = self.target.model
            if isinstance(model, nn.Module):
                self.models[""] = model
                self.built_at = made_at(model) if has_source(name) else ""
            elif has_source(name):
                with self._sites.following():
                    capture(model, self.target.inputs, on_cpu=options.on_cpu)
        imported = [getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]]
        super().__init__(_file_of(name), [Path(path) for path in imported if path.endswith(".py")])

    def _found(self, prefix: str, model: nn.Module) -> None:
        self.models[prefix] = model
        self._calls.append((model, self._sites.source_call()))

    def seen(self, step: Step) -> Program:
        """Of a function: the optimizers that it made, and the calls of its models."""
        lines = dict.fromkeys(each.line for each in self._optimizers)
        models = (called(model, call, self._optimizers) for model, call in self._calls)
        return replace(super().seen(step), optimizers=tuple(lines), models=tuple(models))


def _file_of(target: str) -> Path:
    """The file a target is in; a module's is known once it is loaded."""
    name = target.rpartition(":")[0]
    if name.endswith(".py") or os.sep in name:
        return Path(name).resolve()
    return Path(str(getattr(sys.modules.get(name), "__file__", ""))).resolve()
