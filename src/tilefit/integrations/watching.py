"""What the callbacks of trainers have in common."""

from __future__ import annotations

import sys
from typing import Any

from tilefit.precision import Watch
from tilefit.report import Watched


class Watching:
    """Watches a training, and prints what it found to stderr when that ends.

    Args:
        options: Options of :class:`tilefit.precision.Watch`, such as ``every`` and ``steps``.

    Attributes:
        report: The report, once the training has ended.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        self._watch: Watch | None = None
        self.report: Watched | None = None

    def begin(self, model: Any, **more: Any) -> None:
        """Watch a model from now on."""
        self._watch = Watch(model, **more, **self._options).start()

    def stop(self, *, says: bool = False) -> None:
        """Stop watching; with ``says`` the report is printed."""
        if self._watch is not None:
            self._watch.stop()
            self.report = self._watch.report()
            self._watch = None
        if says and self.report is not None:
            print(self.report, file=sys.stderr)
