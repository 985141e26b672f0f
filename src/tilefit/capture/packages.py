"""The package that a file of the user's belongs to."""

from __future__ import annotations

import ast
import os
import re
import site
import sysconfig
from functools import cache
from pathlib import Path

import torch

from tilefit.version import FOLDER

_INSTALLED = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (
        *site.getsitepackages(),
        site.getusersitepackages(),
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        os.path.dirname(torch.__file__),
        str(FOLDER),
    )
)


@cache
def is_installed(path: str) -> bool:
    """Whether a file belongs to Python or to an installed package, or is no file at all."""
    is_file = bool(path) and not path.startswith("<")
    return not is_file or bool(library_folder(path)) or os.path.realpath(path).startswith(_INSTALLED)


@cache
def library_folder(path: str) -> str:
    """The folder of installed packages that a file is in: ``site-packages``, or what ``pip install --target``
    filled, of which the program's own files may lie beside them; empty for a file of the user's."""
    parts = path.split(os.sep)
    for count in range(len(parts) - 1, 0, -1):
        folder = os.sep.join(parts[:count])
        if parts[count - 1] in ("site-packages", "dist-packages") or parts[count] in _put_into(folder):
            return folder
    return ""


@cache
def _put_into(folder: str) -> frozenset[str]:
    """Names of the files and folders that installed wheels put into a folder, by their records."""
    records = Path(folder or os.sep).glob("*.dist-info/RECORD")
    lines = [line for record in records for line in record.read_text("utf-8", "replace").splitlines()]
    return frozenset(re.split("[/,]", line, maxsplit=1)[0] for line in lines)


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
