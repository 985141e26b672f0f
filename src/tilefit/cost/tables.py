"""The tables beside this package: constants with their sources, by name."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DATA = Path(__file__).parent / "data"


def toml(name: str) -> dict[str, Any]:
    """The table ``data/NAME.toml``."""
    return tomllib.loads((DATA / f"{name}.toml").read_text("utf-8"))


def facts(name: str) -> SimpleNamespace:
    """The same, its values by their names."""
    return SimpleNamespace(**toml(name))
