"""From a model and its inputs to the step it executes, on shapes alone.

Importing the package does not import PyTorch; using :func:`capture` does.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilefit.capture.run import capture

__all__ = ["capture"]


def __getattr__(name: str) -> Any:
    if name == "capture":
        from tilefit.capture.run import capture

        return capture
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
