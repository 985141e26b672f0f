"""Replacing attributes for a while, and putting everything back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """Attributes replaced on modules and classes.

    What was replaced is put back by :meth:`undo`, in reverse order. Where somebody else has replaced our
    replacement in the meantime, theirs stays: it calls ours, which then calls straight through.
    """

    def __init__(self) -> None:
        self.active = True
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def wrap(self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace ``owner.name`` by ``around(owner.name)``; a class attribute as the class itself holds "
        "it."""
        kept = vars(owner).get(name, _ABSENT)
        original = getattr(owner, name)
        inner = around(original)

        def outer(*args: Any, **kw: Any) -> Any:
            return (inner if self.active else original)(*args, **kw)

        outer.__name__, outer.__doc__ = name, original.__doc__
        outer.__wrapped__ = original  # type: ignore[attr-defined]
        setattr(owner, name, outer)
        self._replaced.append((owner, name, kept, outer))

    def undo(self) -> None:
        """Put everything back."""
        self.active = False
        for owner, name, kept, ours in reversed(self._replaced):
            if vars(owner).get(name) is not ours:
                continue
            if kept is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, kept)
        self._replaced.clear()


def with_subclasses(base: type) -> list[type]:
    """A class and every subclass of it that is loaded."""
    classes: list[type] = [base]
    for found in classes:
        inner: list[type] = found.__subclasses__()
        classes += [one for one in inner if one not in classes]
    return classes
