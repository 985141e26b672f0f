"""Files that libraries open in C, C++ or Rust: each is told the place that a program's files have."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

from tilefit.capture.program.known import KNOWN
from tilefit.capture.program.late import Change
from tilefit.capture.program.scratch import Scratch

#: Names that are no files.
_NONE = (":memory:", "")

Replace = Callable[[Any, str, Any], None]


def changes(replace: Replace, scratch: Callable[[], Scratch]) -> dict[str, Change]:
    """Of the modules, so that they write and read where Python's own functions do.

    Args:
        replace: Gives an attribute another value.
        scratch: Where the files are.
    """
    return {name: partial(_place, replace=replace, scratch=scratch) for name in KNOWN["opens"]}


def _place(module: ModuleType, *, replace: Replace, scratch: Callable[[], Scratch]) -> None:
    for function, opens in KNOWN["opens"][module.__name__].items():
        owner, _, name = function.rpartition(".")  # ``Class.__init__`` for what a class opens
        of: Any = getattr(module, owner, None) if owner else module
        if hasattr(of, name):
            replace(of, name, _placed(getattr(of, name), scratch, *opens))


def _placed(function: Any, scratch: Callable[[], Scratch], position: int, argument: str, how: str) -> Any:
    """A function that takes the name of a file as this argument, and ``how`` it is opened."""

    @wraps(function)
    def asked(*args: Any, **kwargs: Any) -> Any:
        path = args[position] if len(args) > position else kwargs.get(argument)
        if isinstance(path, str | os.PathLike) and os.fspath(path) not in _NONE:
            mode = str((*args[position + 1 :], kwargs.get("mode", "r"))[0]) if how == "mode" else how
            mode = ("r" if os.path.exists(path) else "w") if how == "made" else mode
            place = scratch().place(path, mode.strip("bt") != "r", mode[0] != "w")
            if len(args) > position:
                args = (*args[:position], place, *args[position + 1 :])
            else:
                kwargs = {**kwargs, argument: place}
        return function(*args, **kwargs)

    return asked
