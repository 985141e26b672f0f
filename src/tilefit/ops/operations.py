"""What is known of PyTorch's operations by their names: the tables of ``operations.toml``."""

from __future__ import annotations

import tomllib
from pathlib import Path

#: By table and by what it says of them, the operations.
NAMED: dict[str, dict[str, frozenset[str]]] = {
    table: {what: frozenset(names.split()) for what, names in said.items()}
    for table, said in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
}


def by_name(table: str) -> dict[str, str]:
    """What a table says of each operation that it names."""
    return {name: what for what, names in NAMED[table].items() for name in names}
