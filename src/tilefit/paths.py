"""Where tilefit keeps what belongs to the user."""

from __future__ import annotations

import os
import time
from pathlib import Path


def data_folder() -> Path:
    """``tilefit`` below the user's data directory (``$XDG_DATA_HOME``, else ``~/.local/share``)."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "tilefit"


def cache_folder() -> Path:
    """``tilefit`` below the user's cache directory (``$XDG_CACHE_HOME``, else ``~/.cache``).

    What is there can be deleted at any time.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilefit"


def corrupt_name(path: Path) -> Path:
    """The name under which a broken file is set aside: beside it, and not taken."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    return path.with_name(f"{path.name}.corrupt-{stamp}-{os.getpid()}")
