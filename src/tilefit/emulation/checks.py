"""What a check that would end the program expects of a value: the program is taken to be in order."""

from __future__ import annotations

import ast
import linecache
import sys
from functools import cache
from pathlib import Path
from types import FrameType

_OWN = str(Path(__file__).parents[1])
#: What modes of PyTorch's, such as that of a default device, do on the way.
_PASSING_ON = ("__torch_function__", "__torch_dispatch__", "handle_torch_function")
#: Where an expression begins and ends: lines and columns.
_Span = tuple[int, int, int, int]


def asking() -> FrameType:
    """Where the code runs that asks."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_OWN) or frame.f_code.co_name in _PASSING_ON
    ):
        frame = frame.f_back
    return frame


def expected() -> bool | None:
    """What lets the program go on where the code that runs asks whether something is true; None where it goes
    on either way, or nobody can tell."""
    frame = asking()
    code = frame.f_code
    if frame.f_lineno not in _checks(code.co_filename):
        return None
    positions = list(code.co_positions())
    # A jump may say that it belongs to the whole statement; what it tests was made just before.
    for at in (frame.f_lasti // 2, frame.f_lasti // 2 - 1):
        first, last, begin, end = positions[at]
        for test, wanted in _checks(code.co_filename)[frame.f_lineno]:
            found = _sought(test, wanted, (first or 0, begin or 0, last or 0, end or 0))
            if found is not None:
                return found
    return None


@cache
def _checks(file: str) -> dict[int, list[tuple[ast.expr, bool]]]:
    """By line, what is tested by assertions and before errors, and what it is to be."""
    found: dict[int, list[tuple[ast.expr, bool]]] = {}
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return found
    for node in ast.walk(tree):
        raises = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)
        if isinstance(node, ast.If | ast.Assert) and (raises or isinstance(node, ast.Assert)):
            for line in range(node.test.lineno, (node.test.end_lineno or 0) + 1):
                found.setdefault(line, []).append((node.test, not raises))
    return found


def _sought(node: ast.expr, wanted: bool, at: _Span) -> bool | None:
    """What the part of a test that is asked for is to be, so that the whole is as wanted."""
    span = node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0
    if not (span[:2] <= at[:2] and at[2:] <= span[2:]):
        return None
    match node:
        case ast.UnaryOp(op=ast.Not()):
            return not wanted if span == at else _sought(node.operand, not wanted, at)
        case ast.BoolOp():
            parts = (_sought(each, wanted, at) for each in node.values)
            return next((each for each in parts if each is not None), None)
        case ast.Compare() if span != at:
            return None  # a number, which is compared
    return wanted
