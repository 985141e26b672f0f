"""Which line of the user's code is running."""

from __future__ import annotations

import os
import sys
from functools import cache
from types import FrameType

import torch

from tilefit.capture.sites import short_path

_TILEFIT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
#: Where the files begin that are nobody's fault.
_FOREIGN = (
    _TILEFIT,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    *(_STANDARD + name for name in ("contextlib", "functools", "runpy", "importlib", "threading", "weakref")),
    "<frozen",
    "<string",
)
#: Libraries that run other people's loops: their caller is blamed, if there is one.
_LOOPS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", f"transformers{os.sep}trainer")


@cache
def _blame(filename: str) -> int:
    """0 for code that is never blamed, 1 for a library's loop, 2 for the user's or a model's code."""
    if filename.startswith(_FOREIGN):
        return 0
    installed = any(f"site-packages{os.sep}{name}" in filename for name in _LOOPS)
    return 1 if installed or any(f"{os.sep}{name}{os.sep}" in filename for name in _LOOPS[:4]) else 2


short = cache(short_path)


def user_line() -> str:
    """``file:line`` of the innermost frame of the user's code; of a library's loop if there is none; or
    empty."""
    frame: FrameType | None = sys._getframe(1)
    loop = ""
    while frame is not None:
        blame = _blame(frame.f_code.co_filename)
        if blame == 2:
            return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
        if blame == 1 and not loop:
            loop = f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return loop
