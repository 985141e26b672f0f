"""What was changed in live objects, and how it is taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from tilefit.fixes.changes.behaviour import Behaviour, Changed
from tilefit.fixes.changes.run import Run


class Edits:
    """Changes of live objects in their order; whoever changes one notes here what takes it back: functions of
    files with their arguments, so that a plan can be pickled, and what is copied takes back the copy's."""

    def __init__(self) -> None:
        self._undos: list[Callable[[], Any]] = []

    def give(self, module: nn.Module, path: str, behaviour: Behaviour) -> None:
        """Give a module a behaviour.

        Raises:
            RefusedError: it cannot be given to it.
        """
        behaviour.require(module, path)
        changed = Changed.of(module)
        first, *others = changed.behaviours or (None,)
        if behaviour.is_innermost and first is not None and first.is_innermost:
            self.set(changed, "behaviours", (behaviour, *others))
            return
        changed.add(behaviour)
        self.undone_by(partial(changed.remove, behaviour))

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute, which the target need not have had."""
        is_new = hasattr(target, "__dict__") and name not in vars(target)
        kept = () if is_new else (getattr(target, name),)
        setattr(target, name, value)
        self.undone_by(partial(delattr if is_new else setattr, target, name, *kept))

    def run(self, run: Run, **options: Any) -> None:
        """Change how the step runs."""
        self.undone_by(run.change(**options))

    def undone_by(self, undo: Callable[[], Any]) -> None:
        """Note what takes back the change that was just made."""
        self._undos.append(undo)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """What the block notes is taken back if it raises."""
        before = len(self._undos)
        try:
            yield
        except BaseException:
            self.undo(before)
            raise

    def undo(self, left: int = 0) -> None:
        """Take all of it back, the last first, but for so many changes."""
        while len(self._undos) > left:
            self._undos.pop()()
