"""The map in the guide is that of the code."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def architecture() -> ModuleType:
    return _script("architecture")


def test_the_map_is_that_of_the_code(architecture: ModuleType) -> None:
    assert architecture.stored() == architecture.drawn(), "python benchmarks/architecture.py draws it anew"


def test_the_site_shows_the_map_as_a_table(architecture: ModuleType) -> None:
    """What draws it would be loaded from elsewhere."""
    page = SimpleNamespace(file=SimpleNamespace(src_path="architecture.md"))
    markdown = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = _script("site_hooks").on_page_markdown(markdown, page=page)
    assert "mermaid" not in shown
    for room in (room for row in architecture.layers() for room in row):
        assert len(re.findall(rf"^\| `{room}` \| (?:`|–)", shown, re.MULTILINE)) == 1
    assert "| `cli` | `sweep`, `profiling`, `precision` |" in shown


def test_every_package_stands_in_a_layer(architecture: ModuleType) -> None:
    rooms = {room for row in architecture.layers() for room in row}
    tops = {path.stem for path in (ROOT / "src" / "tilefit").iterdir() if not path.name.startswith("_")}
    assert tops - {"py"} == rooms


def test_arrows_point_down(architecture: ModuleType) -> None:
    rows = architecture.layers()
    height = {room: number for number, row in enumerate(rows) for room in row}
    for room in height:
        for other in architecture.imports(room) & height.keys():
            assert height[room] <= height[other], f"{room} imports {other}"


def test_files_that_the_page_names_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?:src|tests|docs|benchmarks)/[\w/.*-]+)`", text)
    assert named
    for name in named:
        assert list(ROOT.glob(name)), name


def test_every_function_fits_a_screen() -> None:
    long = [
        f"{path.name}: {function.name}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(function) > 60
    ]
    assert not long


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Its lines without its docstring."""
    first = function.body[0]
    told = isinstance(first, ast.Expr) and ast.get_docstring(function) is not None
    begin = first.end_lineno if told else function.lineno - 1
    return (function.end_lineno or 0) - (begin or 0) + told * (first.lineno - function.lineno)
