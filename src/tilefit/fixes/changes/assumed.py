"""What is taken for granted of a module: that its ``forward`` would do what it did when it was changed."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import starmap
from typing import Any

import torch
from torch import nn

#: Attributes that a changed module has more than a plain one.
OF_CHANGED = ("_tilefit", "_replicate_for_data_parallel", "__prepare_scriptable__", "forward")
#: What every module may have for itself.
OF_MODULES = frozenset((*vars(nn.Module()), *OF_CHANGED, "_compiled_call_impl"))

#: What is read: of whom, its name, its value, and a copy of what that holds, where that can be changed.
_Read = tuple[Any, str, Any, Any]


class _Outside:
    """What a class's ``forward`` and the functions it calls read that is neither argument nor attribute, as
    it is now. A copy has what this one has; one that is loaded in another process, what is there.

    Attributes:
        reads: What is read.
    """

    def __init__(self, kind: type, forward: Callable[..., Any]) -> None:
        self._of = kind, forward
        self.reads = _outside(kind, forward)

    def __deepcopy__(self, memo: Any) -> _Outside:
        return self

    def __reduce__(self) -> Any:
        return _Outside, self._of


def _outside(kind: Any, forward: Callable[..., Any]) -> tuple[_Read, ...]:
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
            if owner is not None:
                found[id(owner), name] = _noted(owner, name, value)
            if owner is kind or not str(getattr(value, "__module__", "")).startswith("torch."):
                waiting.append(value)
    return tuple(found.values())


def _noted(owner: Any, name: str, value: Any) -> _Read:
    held = contents(value)
    return owner, name, value, None if held is None else held.copy()


def _is_still(owner: Any, name: str, value: Any, copy: Any) -> bool:
    now = getattr(owner, name, None)
    # What this package puts there for a while computes the same.
    is_same = now is value or now == value or str(getattr(now, "__module__", "")).startswith("tilefit.")
    return is_same and (copy is None or contents(value) == copy)


def _read_by(function: Any, kind: type) -> Iterator[tuple[Any, str, Any]]:
    """Of what (None where nobody can put another in its place) code reads what by name, and its value."""
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
    if isinstance(value, nn.Module | torch.Tensor | type | types.ModuleType) or callable(value):
        return None
    return getattr(value, "__dict__", None)


class Assumed:
    """What a module's ``forward`` may read beside arguments, parameters and parts, as it is now.

    Of a module of ``torch.nn`` those are plain attributes; of others all.

    Args:
        module: The module.

    Attributes:
        kind, forward: The module's class, and that of the class.
        parts: Names of its parts: a parametrization, which computes a parameter anew, is one.
        own: Its attributes, but for those that every module has.
        outside: What else ``forward`` reads. Of this module, and not of its class once and for all: a plan
            that is made after something was exchanged is of the module as it is by then.
    """

    def __init__(self, module: nn.Module) -> None:
        kind: Any = type(module)
        self.kind, self.forward = kind, kind.forward
        self.outside = _Outside(kind, kind.forward)
        self.parts = tuple(module._modules)
        own = ((name, value) for name, value in vars(module).items() if name not in OF_MODULES)
        self.own = [_noted(module, *each) for each in own if is_plain(each[1]) or not is_torchs(module)]

    def holds(self, module: nn.Module) -> bool:
        """Whether a module is as it was: calls the functions that it called, with attributes as they were."""
        kind: Any = type(module)
        if torch.compiler.is_compiling():  # which compiles anew for another value
            is_same = all(getattr(module, name, None) == value for _, name, value, _ in self.own)
            return is_same and kind.forward is self.forward
        others: Iterable[_Read] = self.outside.reads
        if kind is not self.kind:
            others = [(kind if owner is self.kind else owner, *read) for owner, *read in others]
        if kind.forward is not self.forward or tuple(module._modules) != self.parts:
            return False
        # Most are the very same: there is no faster way to tell.
        doubtful = [
            (owner, name, value, copy)
            for owner, name, value, copy in (*self.own, *others)
            if copy is not None or getattr(owner, name, None) is not value
        ]
        try:
            return all(starmap(_is_still, doubtful))
        except (RuntimeError, ValueError):  # tensors compare to many values
            return False
