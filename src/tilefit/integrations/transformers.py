"""A callback for the Trainer of transformers.

>>> from tilefit.integrations.transformers import PrecisionCallback  # doctest: +SKIP
>>> trainer = Trainer(model, arguments, callbacks=[PrecisionCallback()])  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from tilefit.integrations.watching import Watching


class PrecisionCallback(Watching, TrainerCallback):  # type: ignore[misc]
    """Watches the training of a Trainer, and prints what it found to stderr when that ends; see
    :class:`.watching.Watching`.

    A Trainer tells its callbacks nothing of an exception: after one, call :meth:`stop`.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Begin to watch."""
        self.begin(kw.get("model"))

    def on_train_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Stop, and say what was found."""
        self.stop(says=state.is_world_process_zero)
