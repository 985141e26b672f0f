"""Changing what a module does by exchanging its class."""

from __future__ import annotations

from typing import Any

from torch import nn

from tilefit.fixes.edits import Edits
from tilefit.fixes.modules import require_plain, submodule

__all__ = ["require_plain", "submodule", "swap"]


def swap(edits: Edits, module: nn.Module, cls: type[nn.Module], **attributes: Any) -> None:
    """Make ``module`` an instance of ``cls``, a subclass of its class, with more attributes."""
    kept = type(module)
    assert issubclass(cls, kept)
    module.__class__ = cls
    for name, value in attributes.items():
        setattr(module, name, value)

    def undo() -> None:
        module.__class__ = kept
        for name in attributes:
            delattr(module, name)

    edits.undone_by(undo)
