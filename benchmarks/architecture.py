"""Draws the map of the packages in ``docs/architecture.md`` from the code itself.

    PYTHONPATH=src python benchmarks/architecture.py

What stands between ``<!-- map -->`` and ``<!-- end -->`` is replaced: the packages in the layers that the
import contract names, an arrow for each import that no other path of arrows implies, and what each of them is
for, with those within it that a contract of its own names. The tests draw it again and compare.
"""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
_SOURCE = ROOT / "src" / "tilefit"
_MAP = re.compile(r"(?<=^<!-- map -->\n).*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)


def layers(package: str = "tilefit") -> list[list[str]]:
    """The layers of a package by its import contract, top first; none where there is no contract."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = (row for each in contracts if each.get("containers") == [package] for row in each["layers"])
    return [[name.strip() for name in row.split(":")] for row in rows]


def files(room: str) -> list[Path]:
    """The modules of a package, or the one of that name."""
    folder = _SOURCE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def imports(room: str) -> set[str]:
    """The packages that one of this package's modules imports when it runs."""
    found = set()
    for file in files(room):
        tree = ast.parse(file.read_text())
        typed = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and id(node) not in typed:
                if node.module == "tilefit":
                    found |= {alias.name for alias in node.names}
                elif node.module.startswith("tilefit."):
                    found.add(node.module.split(".")[1])
    return found - {room}


def arrows(rooms: list[str]) -> dict[str, set[str]]:
    """Imports among the packages, without those that follow from others."""
    direct = {room: imports(room) & {*rooms} for room in rooms}

    @cache
    def reached(room: str) -> frozenset[str]:
        return frozenset(direct[room]).union(*(reached(other) for other in direct[room]))

    return {room: direct[room] - set().union(*(reached(other) for other in direct[room])) for room in rooms}


def purpose(room: str) -> str:
    """The first line of its docstring."""
    file = _SOURCE / room / "__init__.py"
    text = ast.get_docstring(ast.parse((file if file.exists() else files(room)[0]).read_text())) or ""
    return text.splitlines()[0]


def drawn() -> str:
    """The map as Markdown."""
    rows = layers()
    rooms = [room for row in rows for room in row]
    lines = ["```mermaid", "flowchart TD"]
    for number, row in enumerate(rows):
        lines += [
            f"  subgraph layer{number}[ ]",
            "    direction LR",
            *(f"    {room}" for room in row),
            "  end",
        ]
    for room, below in arrows(rooms).items():
        lines += [f"  {room} --> {other}" for other in sorted(below, key=rooms.index)]
    lines += ["```", "", "| package | modules | what it is for |", "| --- | --- | --- |"]
    for room in rooms:
        within = [f"{room}/{each}" for row in layers(f"tilefit.{room}") for each in row]
        lines += [f"| `{each}` | {len(files(each))} | {purpose(each)} |" for each in (room, *within)]
    return "\n".join([*lines, ""])


def stored() -> str:
    """The map as it stands in the page."""
    return _MAP.findall(PAGE.read_text(encoding="utf-8"))[0]


def main() -> None:
    """Put the map into the page."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_MAP.sub(lambda _: drawn(), text), encoding="utf-8")


if __name__ == "__main__":
    main()
