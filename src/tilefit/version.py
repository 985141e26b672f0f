"""The version of tilefit, and where it is installed: below everything, so that every layer may name them."""

from pathlib import Path

__version__ = "0.2.0"

#: The package's own folder.
FOLDER = Path(__file__).parent
