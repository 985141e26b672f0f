"""What is taken for granted of a module: that its ``forward`` would do what it did when it was changed."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import nn

#: Attributes that a changed module has more than a plain one.
OF_CHANGED = ("_tilefit", "_replicate_for_data_parallel", "__prepare_scriptable__", "forward")
#: Where a compiled module keeps its compiled call: neither copies nor pickles have it.
_COMPILED = "_compiled_call_impl"
#: What every module may have for itself.
OF_MODULES = frozenset((*vars(nn.Module()), *OF_CHANGED, _COMPILED))

#: Something that code reads: of what (None where nobody can put another in its place), its name, its value.
_Read = tuple[Any, str, Any]


class _Outside:
    """What a class's ``forward`` and the functions it calls read that is neither argument nor attribute, as
    it is now. A copy knows what this one does; what is loaded in another process, what is so there.

    Attributes:
        reads: What is read.
        holding: What of that can be changed itself (a dictionary of settings), with a copy of what it holds.
    """

    def __init__(self, kind: type, forward: Callable[..., Any]) -> None:
        self._of = kind, forward
        self.reads = _outside(kind, forward)
        values = (value for _, _, value in self.reads if not isinstance(value, types.ModuleType))
        self.holding = tuple((v, held.copy()) for v in values if (held := contents(v)) is not None)

    def __deepcopy__(self, memo: Any) -> _Outside:
        return self

    def __reduce__(self) -> Any:
        return _Outside, self._of


def _outside(kind: type, forward: Callable[..., Any]) -> tuple[_Read, ...]:
    """Of the class, of the files that the functions are in, of modules that these import, of functions around
    them."""
    found: dict[tuple[int, str], _Read] = {}
    waiting, seen = [forward], set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        for owner, name, value in _read_by(function, kind):
            found[id(function if owner is None else owner), name] = owner, name, value
            if owner is kind or not str(getattr(value, "__module__", "")).startswith("torch."):
                waiting.append(value)
    return tuple(found.values())


def _read_by(function: Any, kind: type) -> Iterator[_Read]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            yield cell, "cell_contents", cell.cell_contents
    file = sys.modules.get(function.__module__)
    file = file if file is not None and vars(file) is function.__globals__ else None
    names = dict.fromkeys(name for code in _codes(function.__code__) for name in code.co_names)
    known = {name: function.__globals__[name] for name in names if name in function.__globals__}
    yield from ((file, name, value) for name, value in known.items())
    for module in (each for each in known.values() if isinstance(each, types.ModuleType)):
        yield from ((module, name, vars(module)[name]) for name in names if name in vars(module))
    for name in names.keys() - vars(nn.Module).keys():
        value = getattr(kind, name, None)
        if value is not None and not isinstance(value, types.MethodType):  # a new one each time
            yield kind, name, value


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


def is_torchs(module: nn.Module) -> bool:
    """Whether a module is one of ``torch.nn``, whose ``forward`` reads plain attributes and parameters."""
    return type(module).__module__.startswith("torch.nn.")


def is_plain(value: Any) -> bool:
    """Numbers and text, or a list of them."""
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    return isinstance(value, bool | int | float | str | None)


def contents(value: Any) -> Any:
    """What an attribute's value holds, one level deep, if that can be changed; None otherwise."""
    if isinstance(value, list | dict | set):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, nn.Module | torch.Tensor | type) or callable(value):
        return None
    return getattr(value, "__dict__", None)


@dataclass(frozen=True, eq=False)
class Assumed:
    """What a module's ``forward`` may read beside arguments, parameters and parts, as it was.

    Of a module of ``torch.nn`` those are plain attributes; of others all.

    Attributes:
        kind, forward: The module's class, and that of the class.
        size: How many attributes it had; -1 where more make no difference.
        parts: Names of its parts: a parametrization, which computes a parameter anew, is one.
        names, values: Those that every module has left out.
        holding: Values that can be changed, with a copy of what they held.
        outside: What else ``forward`` reads. Of this module, and not of its class once and for all: a plan
            that is made after something was changed is of the module as it is by then.
        get: The values of all the names in ``vars`` of a module.
    """

    kind: type
    forward: Callable[..., Any]
    size: int
    parts: tuple[str, ...]
    names: tuple[str, ...]
    values: Any
    holding: tuple[tuple[Any, Any], ...]
    outside: _Outside
    get: Callable[[Any], Any]

    @classmethod
    def of(cls, module: nn.Module) -> Assumed:
        """Of a module as it is now."""
        attributes = vars(module)
        kind: Any = type(module)
        own = attributes.keys() - OF_MODULES
        size = len(attributes.keys() - {*OF_CHANGED, _COMPILED})
        if is_torchs(module):
            own, size = {name for name in own if is_plain(attributes[name])}, -1
        names = tuple(name for name in attributes if name in own)
        get = itemgetter(*names) if names else _nothing
        holding = [(v, c.copy()) for v in map(attributes.get, names) if (c := contents(v)) is not None]
        parts = tuple(module._modules)
        outside = _Outside(kind, kind.forward)
        return cls(kind, kind.forward, size, parts, names, get(attributes), tuple(holding), outside, get)

    def holds(self, module: nn.Module) -> bool:
        """Whether a module is as it was: calls the functions that it called, with attributes as they were."""
        kind, attributes = type(module), vars(module)
        if kind.forward is not self.forward:
            return False
        if torch.compiler.is_compiling():  # which compiles anew for another value
            values = [self.values] if len(self.names) == 1 else self.values
            return all(getattr(module, n, None) == v for n, v in zip(self.names, values, strict=True))
        for owner, name, value in self.outside.reads:
            if owner is None:
                continue
            now = getattr(kind if owner is self.kind else owner, name, None)
            # What this package puts there for a while computes the same.
            if now is not value and not str(getattr(now, "__module__", "")).startswith("tilefit."):
                return False
        more = len(OF_CHANGED) if "_tilefit" in attributes else 0
        is_as_large = self.size in (-1, len(attributes) - more - (_COMPILED in attributes))
        if not is_as_large or tuple(attributes["_modules"]) != self.parts:
            return False
        try:
            is_same = bool(self.get(attributes) == self.values)
        except (KeyError, RuntimeError, ValueError):  # no such name; tensors compare to many values
            return False
        return is_same and _hold_the_same((*self.outside.holding, *self.holding))


def _hold_the_same(holding: tuple[tuple[Any, Any], ...]) -> bool:
    try:
        return all(contents(value) == copy for value, copy in holding)
    except (RuntimeError, ValueError):  # tensors compare to many values
        return False


def _nothing(attributes: Any) -> tuple[()]:
    return ()
