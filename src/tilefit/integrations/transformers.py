"""A callback for the Trainer of transformers.

>>> from tilefit.integrations.transformers import PrecisionCallback  # doctest: +SKIP
>>> trainer = Trainer(model, arguments, callbacks=[PrecisionCallback()])  # doctest: +SKIP
"""

from __future__ import annotations

import sys
from typing import Any

from transformers import TrainerCallback

from tilefit.precision import Watch
from tilefit.report import Watched


class PrecisionCallback(TrainerCallback):  # type: ignore[misc]
    """Watches the training of a Trainer, and prints what it found to stderr when that ends.

    A Trainer tells its callbacks nothing of an exception: after one, call :meth:`stop`.

    Args:
        options: Options of :class:`tilefit.precision.Watch`, such as ``every`` and ``steps``.

    Attributes:
        report: The report, once training has ended.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._watch: Watch | None = None
        self.report: Watched | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Begin to watch."""
        self._watch = Watch(kw.get("model"), **self._options).start()

    def on_train_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Stop, and say what was found."""
        self.stop()
        if self.report is not None and state.is_world_process_zero:
            print(self.report, file=sys.stderr)

    def stop(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.stop()
            self.report = self._watch.report()
            self._watch = None
