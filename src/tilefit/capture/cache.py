"""Captured steps on disk: a target that is unchanged is not captured again.

A capture is found again if the target, the options, the folder, the search path and the versions of tilefit
and of the libraries are the same, and if all that the target read when it was captured is still what it was:
the files of the user's that were imported or opened, those that were looked for and missing, and the
variables of the environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from tilefit.errors import TilefitError
from tilefit.ops import Step
from tilefit.options import TargetOptions
from tilefit.paths import cache_folder
from tilefit.version import FOLDER, __version__

#: The parts of tilefit that a step is made by.
_ROOMS = ("capture", "nn", "ops", "rnn")
_LIBRARIES = ("torch", "torchvision", "transformers", "timm")
#: Larger files are told apart by size and time alone.
_MOST_HASHED_BYTES = 16 << 20
#: The oldest captures beyond so many are deleted; that of GPT-2 takes 250 KB.
_MOST_KEPT = 100
#: Not the user's: what the system says of itself.
_SYSTEM = ("/proc/", "/sys/", "/dev/")


def recall(target: str, options: TargetOptions) -> Step | None:
    """The step that was captured of a target before, if nothing that it depends on has changed."""
    path = _path(target, options)
    try:
        first, _, text = path.read_text().partition("\n")
        witness = json.loads(first)
        if _state(witness["files"], witness["variables"], os.environ) != witness:
            return None
        os.utime(path)  # the least recently used is deleted first
        return Step.from_json(text)
    except (OSError, ValueError, KeyError, TypeError, TilefitError):
        return None  # none is there, or it is damaged: it is made anew


def remember(target: str, options: TargetOptions, witness: str, text: str) -> None:
    """Keep a captured step, with what :class:`Witness` says that it depends on, as JSON.

    Where the folder cannot be written, nothing is lost but time.
    """
    path = _path(target, options)
    partial = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(f"{witness}\n{text}")
        partial.replace(path)
        kept = sorted(path.parent.glob("*.step"), key=lambda each: each.stat().st_mtime, reverse=True)
        for old in kept[_MOST_KEPT:]:
            old.unlink(missing_ok=True)


class Witness:
    """Sees what this process reads, from now to its end."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)  # libraries set variables of their own when they are imported
        self._files: set[str] = set()
        self._variables: set[str] = set()
        sys.addaudithook(self._heard)
        kind = type(os.environ)
        original = kind.__getitem__

        def getitem(environ: Any, name: Any) -> Any:
            self._variables.add(str(name))
            return original(environ, name)

        kind.__getitem__ = getitem  # type: ignore[method-assign]

    def _heard(self, event: str, arguments: Sequence[Any]) -> None:
        if event == "open":
            path, mode, flags = arguments
            reads = "r" in mode if isinstance(mode, str) else not (flags or 0) & (os.O_WRONLY | os.O_RDWR)
            if reads and isinstance(path, str | os.PathLike):
                self._files.add(os.path.abspath(os.fspath(path)))

    def to_json(self) -> str:
        """What was read, and what it was, in one line."""
        from tilefit.capture.packages import is_installed

        modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        files = {os.path.abspath(file) for file in modules if file} | self._files
        own = [
            file
            for file in files
            if not file.endswith(".pyc") and not file.startswith(_SYSTEM) and not is_installed(file)
        ]
        return json.dumps(_state(own, self._variables, self._environment))


def _state(files: Iterable[str], variables: Iterable[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """What files and variables are now."""
    return {
        "files": {name: _content(name) for name in sorted(files)},
        "variables": {name: _hashed(environment.get(name)) for name in sorted(variables)},
    }


def _content(file: str) -> Any:
    """What tells one content of a file from another; None where there is no file."""
    try:
        status = os.stat(file)
        if status.st_size > _MOST_HASHED_BYTES:
            return [status.st_size, status.st_mtime_ns]
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None


def _hashed(value: str | None) -> str | None:
    """A variable may be a secret."""
    return None if value is None else hashlib.sha256(value.encode(errors="replace")).hexdigest()


def _path(target: str, options: TargetOptions) -> Path:
    about = [target, asdict(options), os.getcwd(), sys.path, versions(_ROOMS)]
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "captures" / f"{key}.step"


@cache
def versions(rooms: tuple[str, ...]) -> list[str]:
    """Of Python, of some of tilefit's packages, by their files, and of the libraries that a capture uses."""
    stamps = []
    for room in rooms:
        for place, _, names in os.walk(FOLDER / room):
            for name in names:
                if name.endswith((".py", ".toml", ".npz", ".json")):
                    status = os.stat(os.path.join(place, name))
                    stamps.append(f"{place}/{name} {status.st_size} {status.st_mtime_ns}")
    digest = hashlib.sha256("\n".join(sorted(stamps)).encode()).hexdigest()
    found = [f"Python {sys.version}", f"tilefit {__version__} {digest}"]
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return found
