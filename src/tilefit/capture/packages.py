"""The package that a file of the user's belongs to."""

from __future__ import annotations

import ast
from pathlib import Path


def package_of(path: Path) -> tuple[str, Path]:
    """The package around a file, such as ``speech.models``, and the folder that it is imported from.

    The name is empty, and the folder the file's own, where no ``__init__.py`` stands beside the file.
    """
    folder = path.resolve().parent
    names: list[str] = []
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        names.insert(0, folder.name)
        folder = folder.parent
    return ".".join(names), folder


def imports_relatively(path: Path) -> bool:
    """Whether a file imports from its package (``from .model import Net``), and so cannot run outside it.

    Raises:
        SyntaxError: the file is no Python.
    """
    nodes = ast.walk(ast.parse(path.read_bytes(), str(path)))
    return any(isinstance(node, ast.ImportFrom) and node.level > 0 for node in nodes)
