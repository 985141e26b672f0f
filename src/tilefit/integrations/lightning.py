"""A callback for the Trainer of Lightning, of either of its packages.

>>> from tilefit.integrations.lightning import PrecisionCallback  # doctest: +SKIP
>>> trainer = Trainer(precision="16-mixed", callbacks=[PrecisionCallback()])  # doctest: +SKIP
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tilefit.precision import Watch
from tilefit.report import Watched

if TYPE_CHECKING:
    Callback = Any
else:
    # The package the program uses, or else the one that is installed.
    _NAMES = ("lightning.pytorch", "pytorch_lightning")
    _LOADED = next((name for name in _NAMES if name in sys.modules), None)
    Callback = import_module(
        _LOADED or ("lightning.pytorch" if find_spec("lightning") else _NAMES[1])
    ).Callback


class PrecisionCallback(Callback):  # type: ignore[misc]
    """Watches a fit, and prints what it found to stderr when that ends.

    Args:
        options: Options of :class:`tilefit.precision.Watch`, such as ``every`` and ``steps``.

    Attributes:
        report: The report, once the fit has ended.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        self._watch: Watch | None = None
        self.report: Watched | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        self._watch = Watch(pl_module, optimizer=trainer.optimizers, **self._options).start()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop, and say what was found."""
        self._stop()
        if self.report is not None and trainer.is_global_zero:
            print(self.report, file=sys.stderr)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop."""
        self._stop()

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self.report = self._watch.report()
            self._watch = None
