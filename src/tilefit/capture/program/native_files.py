"""Files that libraries open in C, C++ or Rust: each is told the place that a program's files have."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from tilefit.capture.program.late import Change
from tilefit.capture.program.scratch import Scratch

#: What is done with a file: it is read, written anew, or changed; or the argument ``mode`` says so.
_READ, _WRITTEN, _CHANGED, _BY_MODE = "r", "w", "r+", ""


class _Opener(NamedTuple):
    """A function that takes the name of a file.

    Attributes:
        module, function: Where it is; ``Class.__init__`` for what a class opens.
        position, argument: Of the name among its arguments; ``mode`` is the next.
        file: One of the four above.
    """

    module: str
    function: str
    position: int
    argument: str
    file: str


_OPENERS = (
    _Opener("safetensors", "serialize_file", 1, "filename", _WRITTEN),
    _Opener("safetensors", "safe_open", 0, "filename", _READ),
    # Who has imported these before.
    _Opener("safetensors.torch", "serialize_file", 1, "filename", _WRITTEN),
    _Opener("safetensors.torch", "safe_open", 0, "filename", _READ),
    _Opener("torch.jit", "save", 1, "f", _WRITTEN),
    _Opener("torch.jit", "load", 0, "f", _READ),
    _Opener("torchvision.io.image", "write_file", 0, "filename", _WRITTEN),
    _Opener("torchvision.io.image", "read_file", 0, "path", _READ),
    _Opener("sqlite3", "connect", 0, "database", _CHANGED),
    _Opener("cv2", "imwrite", 0, "filename", _WRITTEN),
    _Opener("cv2", "imread", 0, "filename", _READ),
    _Opener("h5py", "File.__init__", 1, "name", _BY_MODE),
    _Opener("soundfile", "SoundFile.__init__", 1, "file", _BY_MODE),
    _Opener("pyarrow", "OSFile", 0, "path", _BY_MODE),
    _Opener("pyarrow", "memory_map", 0, "path", _BY_MODE),
    _Opener("pyarrow", "create_memory_map", 0, "path", _CHANGED),
)
#: Names that are no files.
_NONE = (":memory:", "")

Replace = Callable[[Any, str, Any], None]


def changes(replace: Replace, scratch: Callable[[], Scratch]) -> dict[str, Change]:
    """Of the modules, so that they write and read where Python's own functions do.

    Args:
        replace: Gives an attribute another value.
        scratch: Where the files are.
    """
    modules = dict.fromkeys(each.module for each in _OPENERS)
    return {name: functools.partial(_place, replace=replace, scratch=scratch) for name in modules}


def _place(module: ModuleType, *, replace: Replace, scratch: Callable[[], Scratch]) -> None:
    for each in _OPENERS:
        owner: Any = module
        *classes, name = each.function.split(".")
        for part in classes:
            owner = getattr(owner, part, None)
        if each.module == module.__name__ and hasattr(owner, name):
            replace(owner, name, _placed(getattr(owner, name), each, scratch))


def _placed(function: Any, opener: _Opener, scratch: Callable[[], Scratch]) -> Any:
    @functools.wraps(function)
    def asked(*args: Any, **kwargs: Any) -> Any:
        position, argument = opener.position, opener.argument
        path = args[position] if len(args) > position else kwargs.get(argument)
        if isinstance(path, str | os.PathLike) and os.fspath(path) not in _NONE:
            mode = opener.file or str((*args[position + 1 :], kwargs.get("mode", "r"))[0])
            place = scratch().place(path, mode.strip("bt") != "r", mode[0] != "w")
            if len(args) > position:
                args = (*args[:position], place, *args[position + 1 :])
            else:
                kwargs = {**kwargs, argument: place}
        return function(*args, **kwargs)

    return asked
