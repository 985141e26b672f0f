"""A callback for the Trainer of Lightning, of either of its packages.

>>> from tilefit.integrations.lightning import PrecisionCallback  # doctest: +SKIP
>>> trainer = Trainer(precision="16-mixed", callbacks=[PrecisionCallback()])  # doctest: +SKIP
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tilefit.integrations.watching import Watching

if TYPE_CHECKING:
    Callback = Any
else:
    # The package the program uses, or else the one that is installed.
    _NAMES = ("lightning.pytorch", "pytorch_lightning")
    _LOADED = next((name for name in _NAMES if name in sys.modules), None)
    Callback = import_module(
        _LOADED or ("lightning.pytorch" if find_spec("lightning") else _NAMES[1])
    ).Callback


class PrecisionCallback(Watching, Callback):  # type: ignore[misc]
    """Watches a fit, and prints what it found to stderr when that ends; see :class:`.watching.Watching`."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        self.begin(pl_module, optimizer=trainer.optimizers)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop, and say what was found."""
        self.stop(says=trainer.is_global_zero)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop."""
        self.stop()
