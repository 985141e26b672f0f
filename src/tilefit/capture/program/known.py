"""What is known, by name, of what a program may lack: the tables of ``known.toml``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

#: By table, what is known of each name.
KNOWN: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
