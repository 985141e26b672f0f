"""Where the numbers of a program are written: each literal is followed while the program makes its model.

The files that are the user's are run with their literals of some values replaced by numbers that know their
place. Such a number goes through names, parameters, attributes and configurations as any other does, and is
found again among the arguments of the modules' constructors; what is computed from it is a plain number.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tilefit.capture.packages import is_installed

#: The file, the line (from 1) and the column (from 0, in bytes of UTF-8).
Place = tuple[str, int, int]
#: What holds more is data, no configuration.
_MOST_HELD = 1000
#: By the id of a module, the numbers that its constructors were given.
Given = dict[int, list["Written"]]


class Written(int):
    """A whole number of a file, with its place there."""

    place: Place

    @classmethod
    def at(cls, value: int, *place: Any) -> Written:
        """One with its place."""
        written = cls(value)
        written.place = place
        return written


def _written_in(value: Any, depth: int = 3) -> Iterator[Written]:
    """The numbers that a value is, or holds: in tuples, lists, dictionaries and attributes."""
    if isinstance(value, Written):
        yield value
    elif depth and not isinstance(value, nn.Module | torch.Tensor):  # whose numbers are their own
        held = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        held = value if isinstance(value, tuple | list) else list(held.values())
        for each in held if len(held) < _MOST_HELD else ():
            yield from _written_in(each, depth - 1)


@contextmanager
def followed(values: Collection[int]) -> Iterator[Given]:
    """Within the block, literals of these values in files that are imported are :class:`Written`; it is told
    which modules are given them."""
    original, plain, given = SourceFileLoader.get_code, nn.Module.__init__, Given()

    def get_code(self: SourceFileLoader, name: str) -> CodeType | None:
        path = self.get_filename(name)
        if is_installed(path):
            return original(self, name)
        tree = _Following(os.path.realpath(path), values).visit(ast.parse(self.get_data(path), path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def noted(module: nn.Module, *args: Any, **keywords: Any) -> None:
        given[id(module)] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_locals.get(next(iter(frame.f_code.co_varnames), "")) is module:
            given[id(module)] += _written_in(dict(frame.f_locals))  # a constructor, or what one calls
            frame = frame.f_back
        plain(module, *args, **keywords)

    with patch.object(SourceFileLoader, "get_code", get_code), patch.object(nn.Module, "__init__", noted):
        yield given


class _Following(ast.NodeTransformer):
    def __init__(self, path: str, values: Collection[int]) -> None:
        self._path, self._values = path, values

    def visit_Module(self, node: ast.Module) -> ast.AST:
        has_text = ast.get_docstring(node) is not None
        futures = sum(isinstance(each, ast.ImportFrom) and each.module == "__future__" for each in node.body)
        alias = ast.alias(Written.__name__, "__tilefit_written__")
        node.body.insert(has_text + futures, ast.ImportFrom(__name__, [alias], 0))
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if type(node.value) is not int or node.value not in self._values:
            return node
        place = [ast.Constant(each) for each in (self._path, node.lineno, node.col_offset)]
        maker = ast.Attribute(ast.Name("__tilefit_written__", ast.Load()), "at", ast.Load())
        return ast.copy_location(ast.Call(maker, [node, *place], []), node)

    def visit_MatchValue(self, node: ast.MatchValue) -> ast.AST:
        return node
