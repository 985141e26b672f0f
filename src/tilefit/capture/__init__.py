"""From a model and its inputs to the step it executes, on shapes alone."""

from tilefit.capture.run import capture

__all__ = ["capture"]
