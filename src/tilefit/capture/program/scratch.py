"""A program's files: what it writes lands in a folder that is deleted afterwards, and is read from there.

A program that is run to see a step of it would otherwise overwrite the user's checkpoints and logs with those
of a training that never was. Python's own functions are redirected; what libraries open in C is another
module's, ``native_files``, and the system stops the rest (``confined``).
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import Any
from unittest.mock import patch

#: Not files of the user's: devices, and what the system says of itself.
_SYSTEM = ("/dev", "/proc", "/sys")
#: Larger files are not copied, to be changed in the copy.
_MOST_COPIED_BYTES = 1 << 30
#: Makes what is at a path that a program asks a function for (``open``, ``stat``, ``listdir``, ``scandir``)
#: and that is not there; false where it cannot.
Supply = Callable[[str, str], bool]


class Scratch:
    """Where a program's files are.

    Args:
        folder: Exists, and is left alone: what lies in it is where it is. The files of the program go into
            ``files`` in it, each under its own path.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._kept = os.path.realpath(folder)
        self._root = os.path.join(self._kept, "files")
        self.temporary, self._users_temporary = os.path.join(self._kept, "tmp"), tempfile.gettempdir()
        self._gone: set[str] = set()
        self._given: set[str] = set()
        #: How often a file was opened that :meth:`write` has made.
        self.handed_out = 0
        self._os = {
            name: getattr(os, name) for name in ("stat", "mkdir", "rmdir", "rename", "listdir", "scandir")
        }
        self._open, self._rmtree, self._os_open = io.open, shutil.rmtree, os.open

    def twin(self, path: str) -> str:
        """Where a file is that the program has written or was given."""
        return self._root + _full(path)

    def write(self, path: str, data: bytes) -> None:
        """Give the program a file."""
        twin = self.twin(path)
        self._parents(twin)
        partial = f"{twin}.{os.getpid()}"  # processes of the program's may ask for it at once
        with self._open(partial, "wb") as file:
            file.write(data)
        self._os["rename"](partial, twin)
        self._given.add(twin)

    def read_path(self, path: Any) -> Any:
        """The path under which a file of the program's is read.

        Raises:
            FileNotFoundError: the program has deleted it.
        """
        if not self._is_own(path):
            return self._of_before(path)
        twin = self.twin(path)
        if self._exists(twin):
            return twin
        if self.is_gone(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        return path

    def _of_before(self, path: Any) -> Any:
        """For a temporary file that was not made here the user's: libraries cache there what they fetch."""
        is_path = isinstance(path, str | bytes | os.PathLike)
        rest = os.path.relpath(_full(path), self.temporary) if is_path else ".."
        if rest.startswith("..") or self._exists(_full(path)):
            return path
        users = os.path.join(self._users_temporary, rest)
        return users if self._exists(users) else path

    def _as_before(self, path: Any) -> None:
        """Make the folder of a temporary file if it is among the user's."""
        parent = os.path.dirname(_full(path)) if isinstance(path, str | bytes | os.PathLike) else ""
        if parent and self._of_before(parent) != parent:
            self._parents(_full(path))

    def write_path(self, path: Any, *, keeps: bool = False) -> Any:
        """The path under which a file of the program's is written; ``keeps`` what is in it."""
        if not self._is_own(path):
            self._as_before(path)
            return path
        twin = self.twin(path)
        parent = os.path.dirname(_full(path))
        if not self._is_there(parent):
            return path  # and fails as it would
        self._parents(twin)
        if keeps and not self._exists(twin) and not self.is_gone(path) and os.path.isfile(path):
            if os.path.getsize(path) > _MOST_COPIED_BYTES:
                raise OSError(errno.EFBIG, "the program changes a file that is too large to copy", path)
            with self._open(path, "rb") as original, self._open(twin, "wb") as copy:
                shutil.copyfileobj(original, copy)
        return twin

    def place(self, path: Any, writes: object, keeps: bool) -> Any:
        """The path under which a file is read, or written, keeping what is in it."""
        return self.write_path(path, keeps=keeps) if writes else self.read_path(path)

    def _is_own(self, path: Any) -> bool:
        """Whether a path is a name of a file of the program's."""
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        return not _is_beneath(_full(path), (*_SYSTEM, self._kept))

    def _exists(self, path: str) -> bool:
        try:
            self._os["stat"](path)
        except OSError:
            return False
        return True

    def _is_there(self, path: str) -> bool:
        return self._exists(self.twin(path)) or (self._exists(path) and not self.is_gone(path))

    def is_gone(self, path: str) -> bool:
        """Whether the program has deleted it."""
        return bool(self._gone) and _is_beneath(_full(path), self._gone)  # libraries list thousands of files

    def _parents(self, twin: str) -> None:
        missing = []
        while not self._exists(twin := os.path.dirname(twin)):
            missing.append(twin)
        for folder in reversed(missing):
            self._os["mkdir"](folder)

    # ---- what takes the place of Python's functions ----

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """``open``."""
        place = self.place(file, set(mode) & set("wax+"), "w" not in mode)
        self.handed_out += place in self._given
        return self._open(place, mode, *args, **kwargs)

    def os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """``os.open``."""
        if dir_fd is None:
            path = self.place(path, flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT), not flags & os.O_TRUNC)
        return self._os_open(path, flags, mode, dir_fd=dir_fd)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        """``os.mkdir``."""
        if dir_fd is None and self._is_own(path):
            if self._is_there(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            path = self.write_path(path)
        self._as_before(path)
        self._os["mkdir"](path, mode, dir_fd=dir_fd)

    def removing(self, original: Callable[..., None]) -> Callable[..., None]:
        """``os.remove``, ``os.unlink``, ``os.rmdir``."""

        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            if dir_fd is not None or not self._is_own(path):
                original(path, dir_fd=dir_fd)
            elif original is not os_rmdir or not self.listdir(path):
                self._forget(path, original)
            else:
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)

        os_rmdir = self._os["rmdir"]
        return remove

    def _forget(self, path: Any, delete: Callable[..., None]) -> None:
        """The program has deleted a file or a folder."""
        if not self._is_there(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        if self._exists(twin := self.twin(path)):
            delete(twin)
        if self._exists(path):
            self._gone.add(_full(path))

    def rmtree(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """``shutil.rmtree``."""
        if not self._is_own(path):
            self._rmtree(path, *args, **kwargs)
        elif self._is_there(path) or not (args or kwargs):
            self._forget(path, self._rmtree)

    def rename(self, source: Any, target: Any, **kwargs: Any) -> None:
        """``os.rename`` and ``os.replace``."""
        origin, place = self.read_path(source), self.write_path(target)
        if origin == source and self._is_own(source):  # the user's stays where it is
            shutil.copytree(origin, place) if os.path.isdir(origin) else shutil.copyfile(origin, place)
            self._gone.add(_full(source))
        else:
            self._os["rename"](origin, place, **kwargs)

    def listdir(self, path: Any = ".") -> list[Any]:
        """``os.listdir``."""
        if isinstance(path, bytes) or not self._is_own(path):
            return self._os["listdir"](path)  # type: ignore[no-any-return]
        return [entry.name for entry in self.scandir(path)]

    def scandir(self, path: Any = ".") -> Any:
        """``os.scandir``."""
        if isinstance(path, bytes) or not self._is_own(path):
            return self._os["scandir"](path)
        twin = self.twin(path)
        if not self._exists(twin):
            return _Entries(self._left(self.read_path(path)))
        entries = {entry.name: entry for entry in self._left(path)} if self._exists(path) else {}
        return _Entries([*{**entries, **{entry.name: entry for entry in self._os["scandir"](twin)}}.values()])

    def _left(self, path: Any) -> list[Any]:
        with self._os["scandir"](path) as entries:
            return [entry for entry in entries if not self.is_gone(entry.path)]


def _full(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))


def _is_beneath(path: str, folders: Iterable[str]) -> bool:
    return any(path == each or path.startswith(each + os.sep) for each in folders)


class _Entries(ExitStack):
    """What ``os.scandir`` returns: an iterator that is closed, though nothing is open."""

    def __init__(self, entries: Iterable[Any]) -> None:
        super().__init__()
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)


class _Written(MetaPathFinder):
    """Finds modules that the program has written, which Python's own finders look for where they are not."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        folders = [self._scratch.twin(each) for each in (sys.path if path is None else path)]
        return PathFinder.find_spec(name, [each for each in folders if os.path.isdir(each)])


@contextmanager
def redirected(
    folder: str | os.PathLike[str], supply: Supply = lambda path, function: False
) -> Iterator[Scratch]:
    """Within the block, what is written goes into a folder.

    Args:
        folder: Exists; see :class:`Scratch`.
        supply: Asked for what is read and not there.
    """
    scratch = Scratch(folder)

    def supplied(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def asked(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            try:
                return function(path, *args, **kwargs)
            except FileNotFoundError:
                wanted = isinstance(path, str | os.PathLike) and not scratch.is_gone(os.fsdecode(path))
                if not wanted or not supply(os.fsdecode(path), name):
                    raise
            return function(path, *args, **kwargs)

        return asked

    def placed(function: Callable[..., Any], *, writes: bool = False) -> Callable[..., Any]:
        def asked(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is None:
                path = scratch.place(path, writes, True)
            return function(path, *args, **kwargs)

        return asked

    opened = supplied(scratch.open, "open")
    looks = ("lstat", "access", "readlink", *(["statvfs"] * hasattr(os, "statvfs")))  # Windows has none
    functions: list[tuple[Any, str, Any]] = [
        (builtins, "open", opened),
        (io, "open", opened),
        (shutil, "rmtree", scratch.rmtree),
        (os, "open", scratch.os_open),
        (os, "stat", supplied(placed(os.stat), "stat")),
        *((os, name, placed(getattr(os, name))) for name in looks),
        *((os, name, placed(getattr(os, name), writes=True)) for name in ("chmod", "utime", "truncate")),
        *((os, name, scratch.removing(getattr(os, name))) for name in ("remove", "unlink", "rmdir")),
        *((os, name, scratch.rename) for name in ("rename", "replace")),
        (os, "mkdir", scratch.mkdir),
        (os, "listdir", supplied(scratch.listdir, "listdir")),
        (os, "scandir", supplied(scratch.scandir, "scandir")),
    ]
    with ExitStack() as stack:
        os.makedirs(scratch.temporary, exist_ok=True)
        os.makedirs(os.path.join(folder, "files"), exist_ok=True)
        stack.enter_context(patch.object(tempfile, "tempdir", scratch.temporary))
        for owner, name, function in functions:
            stack.enter_context(patch.object(owner, name, function))
        stack.enter_context(patch.object(sys, "meta_path", [*sys.meta_path, _Written(scratch)]))
        yield scratch
