"""Replacing attributes for a while, and putting everything back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_ABSENT = object()

#: What runs around a call, with its arguments: up to its only ``yield`` before it, and after it with its
#: result, or with what it raised. Without a ``yield`` the call is none of its business.
Around = Callable[..., Generator[None, Any, None]]
#: Rows of a table of patches: on what, which attributes, and what runs around each.
Patch = tuple[Any, str, Around]


class _Running(threading.local):
    """The calls that run on a thread, a name and an object each: a subclass's method calls its base's."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []


class Patches:
    """Attributes replaced on modules and classes.

    What was replaced is put back by :meth:`undo`, in reverse order. Where somebody else has replaced our
    replacement in the meantime, theirs stays: it calls ours, which then calls straight through.
    """

    def __init__(self) -> None:
        self.active = True
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._running = _Running()

    def apply(self, *table: Patch) -> None:
        """Replace attributes."""
        for owner, name, around in table:
            self._wrap(owner, name, around)

    @contextmanager
    def applied(self, *table: Patch) -> Iterator[None]:
        """Within the block attributes are replaced."""
        self.apply(*table)
        try:
            yield
        finally:
            self.undo()

    def _wrap(self, owner: Any, name: str, around: Around) -> None:
        kept = vars(owner).get(name, _ABSENT)
        original = getattr(owner, name)

        def outer(*args: Any, **kw: Any) -> Any:
            calls, call = self._running.calls, (name, id(args[0]) if args else 0)
            if not self.active or call in calls:
                return original(*args, **kw)
            running = around(*args, **kw)
            if next(running, _ABSENT) is _ABSENT:
                return original(*args, **kw)
            calls.append(call)
            try:
                result = original(*args, **kw)
            except BaseException as error:
                with suppress(StopIteration):
                    running.throw(error)
                raise
            finally:
                calls.remove(call)
            with suppress(StopIteration):
                running.send(result)
            return result

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


def of_all(base: type, **methods: Around) -> list[Patch]:
    """Rows for the methods of a class, and of every subclass of it that is loaded and has its own."""
    classes: list[type] = [base]
    for found in classes:
        inner: list[type] = type.__subclasses__(found)
        classes += [one for one in inner if one not in classes]
    return [(one, name, methods[name]) for one in classes for name in methods if name in vars(one)]
