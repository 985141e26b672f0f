"""The user's program as it was loaded: its models, who made them, its files."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import libcst as cst
from torch import nn

from tilefit.capture import capture
from tilefit.capture.naming import has_source
from tilefit.capture.packages import is_installed
from tilefit.capture.sites import SiteTracker
from tilefit.capture.targets import Target, load
from tilefit.fixes.changes.fix import RefusedError, refuse
from tilefit.fixes.source.birth import Births, Caller, Callers, callers, recorded
from tilefit.fixes.source.file import SourceFile
from tilefit.fixes.source.syntax import Syntax
from tilefit.fixes.source.values import followed
from tilefit.ops import Recurrent, Step
from tilefit.options import TargetOptions
from tilefit.rules.layers import linears

#: What sizes are a multiple of that are aligned in every element type: 16 bytes of fp8.
_ALIGNED = 16


class Files:
    """The files of a program's that are the user's to change.

    Args:
        main: The one that is run, or that the target is in.
        named: Others that are known of.
    """

    def __init__(self, main: Path, named: Iterable[Path] = ()) -> None:
        self.main = main
        self._named = tuple(named)
        self._syntaxes: dict[Path, Syntax] = {}

    def syntax(self, path: str | Path) -> Syntax:
        """A file, parsed.

        Raises:
            RefusedError: it cannot be read or parsed.
        """
        resolved = Path(path).resolve()
        if resolved not in self._syntaxes:
            self._syntaxes[resolved] = Syntax(SourceFile.read(resolved))
        return self._syntaxes[resolved]

    def others(self) -> Iterator[Path]:
        """Files beside the main one."""
        yield from self._named

    def syntaxes(self) -> Iterator[Syntax]:
        """All of them, the main one first."""
        yield self.syntax(self.main)
        for path in self.others():
            resolved = path.resolve()
            if resolved != self.main and resolved.is_file() and self.is_own(resolved):
                yield self.syntax(resolved)

    def is_own(self, path: Path) -> bool:
        """Whether a file is the user's to change: no package's, in the main one's folder or this one."""
        folders = (self.main.parent, Path.cwd().resolve())
        return not is_installed(str(path)) and any(path.is_relative_to(folder) for folder in folders)

    def require_own(self, syntax: Syntax) -> None:
        """Refuse a file that is not the user's to change.

        Raises:
            RefusedError: it is not.
        """
        path = syntax.file.path
        refuse(is_installed(str(path)), f"{path.name} belongs to an installed package")
        refuse(not self.is_own(path), f"{syntax.file.name} lies outside the project")


def sizes_of(step: Step) -> set[int]:
    """Sizes of a step's layers that are misaligned in some element type."""
    recurrent = [entry.op for entry in step.ops if isinstance(entry.op, Recurrent)]
    sizes = {size for layer in linears(step) for size in (layer.in_features, layer.out_features)}
    sizes |= {size for op in recurrent for size in (op.input_size, op.hidden_size, op.proj_size)}
    return {size for size in sizes if size % _ALIGNED}


class Program(Files):
    """A target, loaded; what it takes to find the lines behind a finding.

    Attributes:
        loaded: The model and its inputs.
        births: Who made its modules and optimizers.
        models: The models that ran, by what the paths of their modules begin with.
        calls: Who called each of them first, by the same; empty for a target that is a model.

    Args:
        target: As the user typed it.
        options: How it is loaded.
        sizes: Numbers of which it is to be known where they are written.
    """

    def __init__(self, target: str, options: TargetOptions, sizes: Collection[int] = ()) -> None:
        self.target = target
        self.births = Births()
        self.models: dict[str, nn.Module] = {}
        self.calls: dict[str, Callers] = {}
        with recorded(self.births), followed(sizes):
            self.loaded: Target = load(target, options)
            if isinstance(self.loaded.model, nn.Module):
                self.models[""] = self.loaded.model
            elif has_source(target):
                self._run(options.on_cpu)
        super().__init__(_file_of(target))

    def _run(self, on_cpu: bool) -> None:
        """Take the step once, to see which models it runs."""

        def found(prefix: str, model: nn.Module) -> None:
            self.models[prefix] = model
            self.calls[prefix] = callers(sys._getframe(1))

        with SiteTracker(found, lambda: None).following():
            capture(self.loaded.model, self.loaded.inputs, on_cpu=on_cpu)

    # ---- modules ---------------------------------------------------------------------------

    def module(self, path: str) -> nn.Module | None:
        """The module at a path of a finding; None where the program has none there."""
        for prefix, model in reversed(self.models.items()):
            if path.startswith(prefix):
                modules: dict[str, nn.Module] = dict(model.named_modules())
                if (module := modules.get(path.removeprefix(prefix))) is not None:
                    return module
        return None

    @property
    def built_at(self) -> str:
        """The user's line that builds the model, ``train.py:30``; empty where no line of theirs does."""
        if not has_source(self.target):
            return ""
        chain = self.births.of(next(iter(self.models.values()), None))
        for caller in chain:
            if caller.is_users and not caller.of_constructor:
                return f"{os.path.relpath(caller.path)}:{caller.line}"
        return ""

    def others(self) -> Iterator[Path]:
        """The files of modules that were imported."""
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if path and path.endswith(".py") and not is_installed(path):
                yield Path(path)


def _file_of(target: str) -> Path:
    """The file a target is in; a module's is known once it is loaded."""
    name = target.rpartition(":")[0]
    if name.endswith(".py") or os.sep in name:
        return Path(name).resolve()
    return Path(str(getattr(sys.modules.get(name), "__file__", ""))).resolve()


def called(program: Files, chain: Callers, index: int) -> tuple[Syntax, cst.Call]:
    """The call that was going on in a function.

    Raises:
        RefusedError: it is not in the file.
    """
    caller = chain[index]
    if not caller.is_users:
        raise RefusedError(f"a library makes it ({Path(caller.path).name}), whose files stay as they are")
    syntax = program.syntax(caller.path)
    call = syntax.call_ending(*caller.end) if caller.end else None
    if call is None:
        raise RefusedError(f"the call in line {caller.line} of {syntax.file.name} is not found there")
    return syntax, call


def users_call(chain: Callers) -> tuple[int, Caller]:
    """The innermost call that the user wrote, and its index.

    Raises:
        RefusedError: a library made all of them.
    """
    for index, caller in enumerate(chain):
        if caller.is_users:
            return index, caller
    raise RefusedError("no line of yours makes it; one of a function that you name as the target would")
