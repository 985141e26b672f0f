"""What the site needs that the pages, read in the repository, do not: see ``mkdocs.yml``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
_MAP = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to files that lie beside the documentation become what they say: the site does not hold them.

    What draws a map would be loaded from elsewhere; it becomes a table.
    """
    folder = (DOCS / page.file.src_path).parent

    def kept(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(DOCS):
            return link[0]
        path = str(target.relative_to(DOCS.parent))
        return f"`{path}`" if link[1].strip("`") == path else f"{link[1]} (`{path}`)"

    return _LINK.sub(kept, _MAP.sub(_as_table, markdown))


def _as_table(drawn: re.Match[str]) -> str:
    """The packages of a map from the top, each with what it imports."""
    imported: dict[str, list[str]] = {}
    for line in map(str.strip, drawn[1].splitlines()):
        if " --> " in line:
            package, other = line.split(" --> ")
            imported[package].append(f"`{other}`")
        elif line.isidentifier() and line != "end":
            imported[line] = []
    rows = [f"| `{package}` | {', '.join(others) or '–'} |" for package, others in imported.items()]
    return "\n".join(["| package | imports |", "| --- | --- |", *rows])
