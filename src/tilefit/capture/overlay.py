"""Import source files as they would be after a change, without writing them."""

from __future__ import annotations

import io
import os
import sys
import tokenize
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any
from unittest.mock import patch

from tilefit.capture.packages import is_installed


@contextmanager
def overlaid(sources: Mapping[str, str]) -> Iterator[None]:
    """Within the block, files that are imported or run read as ``sources`` says, others as they are.

    The user's modules that were imported in the block are forgotten afterwards, so that the next block reads
    them anew.

    Args:
        sources: Texts by real path.
    """
    original = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> CodeType | None:
        path = self.get_filename(name)
        text = sources.get(os.path.realpath(path))
        if text is None:
            return original(self, name)
        return self.source_to_code(text, path)

    open_code = io.open_code

    def opened(path: str) -> Any:
        text = sources.get(os.path.realpath(path))
        if text is None:
            return open_code(path)
        encoding, _ = tokenize.detect_encoding(io.BytesIO(text.encode()).readline)
        return io.BytesIO(text.encode(encoding))

    before = set(sys.modules)
    try:
        with patch.object(SourceFileLoader, "get_code", get_code), patch.object(io, "open_code", opened):
            yield
    finally:
        for name in sys.modules.keys() - before:
            if not is_installed(getattr(sys.modules[name], "__file__", None) or ""):
                del sys.modules[name]
