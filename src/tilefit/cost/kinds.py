"""Functions by the kind of operation that they are for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from tilefit.ops import Op

_F = TypeVar("_F", bound=Callable[..., Any])


class ByKind(dict[type[Op], Callable[..., Any]]):
    """Functions by the class of an operation, each registered with ``@by_kind(Gemm)``.

    They stand in the module of this package that has the name of the kind, which is imported when the kind is
    first asked for; so a new one is found without being listed anywhere.

    Args:
        otherwise: For kinds that registered none; without it they are an error.
    """

    def __init__(self, otherwise: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self._otherwise = otherwise

    def __call__(self, kind: type[Op]) -> Callable[[_F], _F]:
        """Decorate a function with the kind it is for."""

        def register(function: _F) -> _F:
            self[kind] = function
            return function

        return register

    def __missing__(self, kind: type[Op]) -> Callable[..., Any]:
        module = f"{__package__}.{kind.kind}"
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
        function = self.get(kind, self._otherwise)
        if function is None:
            raise TypeError(f"no cost model for {kind.__name__}")
        self[kind] = function
        return function
