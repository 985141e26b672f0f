"""The command line: one module per verb."""

from tilefit.cli.main import main

__all__ = ["main"]
