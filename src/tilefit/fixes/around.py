"""Modules whose ``forward`` runs inside something of ours, whatever their class is.

The module gets a subclass of its own class, made on demand. ``copy.deepcopy`` and ``pickle`` rebuild it from
the two names it was made of, so that a saved module needs nothing but this package to be loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import nn

#: Calls ``forward`` with the arguments, its own way: ``around(module, forward, *args, **kwargs)``.
Around = Callable[..., Any]


def around_forward(base: type[nn.Module], around: Around) -> type[nn.Module]:
    """A subclass of ``base`` whose ``forward`` is ``around(module, base.forward of it, *args, **kwargs)``.

    ``around`` is a function of a module, found by its name when a module is loaded.
    """
    own: Any
    own, arounds = getattr(base, "_made_of", (base, ()))
    made: type[nn.Module] = _made(own, *arounds, around)
    return made


def arounds(module: nn.Module) -> tuple[Around, ...]:
    """What a module's ``forward`` runs inside of."""
    own_and_arounds: tuple[Any, tuple[Around, ...]] = getattr(module, "_made_of", (None, ()))
    return own_and_arounds[1]


@cache
def _made(own: Any, *arounds: Around) -> Any:
    base: Any = _made(own, *arounds[:-1]) if len(arounds) > 1 else own

    class Changed(base):  # type: ignore[misc]
        _made_of = (own, arounds)

        @wraps(base.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return arounds[-1](self, super().forward, *args, **kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:
            reduced: Any = object.__reduce_ex__(self, protocol)
            return (_new, (*self._made_of, *reduced[1][1:]), *reduced[2:])

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Changed, name, getattr(own, name))
    return Changed


def _new(own: Any, arounds: tuple[Around, ...], *args: Any) -> Any:
    cls = _made(own, *arounds)
    return cls.__new__(cls, *args)
