"""Changing modules of libraries that are perhaps never imported, when they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import util
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: What is done to a module once it has been imported.
Change = Callable[[ModuleType], None]


class _Changing(Loader):
    """Executes a module as its own loader does, and then changes it."""

    def __init__(self, loader: Any, change: Change) -> None:
        self._loader = loader
        self._change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # what else libraries ask of loaders


class _Finder(MetaPathFinder):
    def __init__(self, changes: Mapping[str, Change]) -> None:
        self._waiting = dict(changes)

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        change = self._waiting.pop(name, None)  # asked again for the same name, it leaves it to the others
        if change is None:
            return None
        spec = util.find_spec(name)
        if spec is None or spec.loader is None:
            self._waiting[name] = change
            return None
        spec.loader = _Changing(spec.loader, change)
        return spec


@contextmanager
def changed(changes: Mapping[str, Change]) -> Iterator[None]:
    """Modules by name are changed at once where they are imported, else when the block imports them."""
    finder = _Finder({name: change for name, change in changes.items() if name not in sys.modules})
    sys.meta_path.insert(0, finder)
    try:
        for name, change in changes.items():
            if name in sys.modules:
                change(sys.modules[name])
        yield
    finally:
        sys.meta_path.remove(finder)
