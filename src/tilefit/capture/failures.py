"""What the errors that a step raises mean for its capture: the table of ``failures.toml``."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import torch

from tilefit.capture.sites import user_line
from tilefit.errors import CaptureError, TilefitError

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_HINTS: dict[str, str] = _TABLES["hints"]
ELSEWHERE, ON_CPU, CHECK_INPUTS = (_HINTS[name] for name in ("elsewhere", "on_cpu", "check_inputs"))


def first_line(error: BaseException) -> str:
    """The first line of an error's text; of one without text the name of its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def explained(error: Exception, *, on_shapes: bool) -> CaptureError:
    """What to tell the user of an error that a step raised.

    Args:
        error: As the step raised it.
        on_shapes: Its tensors had no values.
    """
    line, kinds = first_line(error), {kind.__name__ for kind in type(error).__mro__}
    meaning = next(
        row
        for row in _TABLES["meanings"]
        if kinds.intersection(row.get("types", kinds))
        and re.search(row.get("text", ""), line, re.IGNORECASE)
        and (on_shapes or not row.get("on_shapes"))
    )
    what = meaning["what"].format(
        type=type(error).__name__,
        line=line,
        sentence=line.partition(". ")[0],
        before=line.partition(": ")[0],
        torch=torch.__version__,
    )
    hint = meaning["hint"]
    return CaptureError(what, where=user_line(error), hint=_HINTS.get(hint, hint))


def needs_device(error: TilefitError) -> bool:
    """Whether a capture failed for want of values, or of a device that the code names."""
    return error.hint in (ELSEWHERE, ON_CPU) or "not compiled with CUDA" in error.what
