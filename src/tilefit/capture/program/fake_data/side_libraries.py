"""Libraries that a program imports and that are not installed: those that only show, log or fetch."""

from __future__ import annotations

import os
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tilefit.capture.program.fake_data.hub import datasets_of
from tilefit.capture.program.fake_data.network import requests_of
from tilefit.capture.program.fake_data.sources import STAND_IN, Sources, asked_by_user, is_prepared
from tilefit.capture.program.known import KNOWN
from tilefit.capture.program.late import Change

_INSTALL = f"Install it where tilefit runs ({sys.executable} -m pip install), or run where it is found."
_INERT, _INERT_PARTS, _WORKING = (
    {*KNOWN["libraries"][name].split()} for name in ("inert", "inert_parts", "working")
)
_WITH_PARTS = {each.partition(".")[0] for each in _INERT_PARTS}


@contextmanager
def answered(sources: Sources) -> Iterator[None]:
    """Within the block, these libraries can be imported."""
    finder = _Finder(sources)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.made:
            sys.modules.pop(name, None)


def changes(sources: Sources) -> dict[str, Change]:
    """Answers what PyTorch writes for TensorBoard."""
    return {"torch.utils.tensorboard.writer": lambda module: _writers(sources, module)}


def _writers(sources: Sources, module: ModuleType) -> None:
    """Its folder is there, as programs expect; a graph of the model is traced by values, which nobody has."""
    kind = module.SummaryWriter
    make = kind.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        os.makedirs(self.log_dir, exist_ok=True)

    sources.replace(kind, "__init__", made)
    sources.replace(kind, "add_graph", lambda *args, **kwargs: None)


class _Finder(MetaPathFinder, Loader):
    """Finds what nobody else has found."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self.made: set[str] = set()

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        library = name.partition(".")[0]
        if library not in self.made:
            if name != library or not self._is_wanted(library):
                return None
        elif library in _WITH_PARTS and ".".join(name.split(".")[:2]) not in _INERT_PARTS:
            self._sources.note(f"the library {library}", _INSTALL)
            return None
        self.made.add(name)
        return ModuleSpec(name, self, is_package=True)

    def _is_wanted(self, library: str) -> bool:
        known = library in _INERT | _WORKING | _WITH_PARTS | {"google"}
        # Other libraries look themselves for what is installed, and do without.
        for_tensorboard = library in ("google", "tensorboard") and "torch.utils.tensorboard" in sys.modules
        asked = asked_by_user() or for_tensorboard
        # What other systems alone have is part of Python, too, and its library does without.
        if not asked or is_prepared() or library in sys.stdlib_module_names:
            return False
        self._sources.note(f"the library {library}", STAND_IN if known else _INSTALL)
        if known and self._sources.fake:
            self._sources.state(
                f"the library {library}", "a stand-in" if library in _WORKING else "does nothing"
            )
        return known and self._sources.fake

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """One that works, or one that does nothing."""
        makers = {"requests": requests_of, "datasets": datasets_of, "six": _six, "tqdm": _tqdm}
        maker = makers.get(spec.name.partition(".")[0])
        return maker(self._sources) if maker else _InertModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It has no code."""


class Inert:
    """Takes everything and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a decorator it leaves the function as it is."""
        alone = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if alone else Inert()

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (Inert,)

    def __iter__(self) -> Iterator[Any]:
        return iter([Inert() for _ in range(_unpacked(sys._getframe(1)))])

    def __getitem__(self, key: Any) -> Any:
        return Inert()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __len__(self) -> int:
        return 0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __float__(self) -> float:
        return 0.0

    def __index__(self) -> int:
        return 0

    def __format__(self, spec: str) -> str:
        return format(0.0, spec) if spec else "0"

    def __bool__(self) -> bool:
        return True

    def __add__(self, other: Any) -> Any:
        """The colour of a text, say."""
        return other

    __radd__ = __add__


def _unpacked(frame: Any) -> int:
    """Into how many variables a frame unpacks what it iterates over (``figure, axes = …``)."""
    import dis

    at = next((each for each in dis.get_instructions(frame.f_code) if each.offset == frame.f_lasti), None)
    return int(at.arg or 0) if at is not None and at.opname == "UNPACK_SEQUENCE" else 0


class _InertModule(ModuleType):
    __version__ = "99.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert()


def _six(sources: Sources) -> ModuleType:
    """Python 2's names, for Python 3's modules."""
    module = _InertModule("six")
    module.urllib = urllib  # type: ignore[attr-defined]
    module.moves = module  # type: ignore[attr-defined]
    return module


def _tqdm(sources: Sources) -> ModuleType:
    """Progress bars: they hand on what they are given."""

    class Bar(Inert):
        def __init__(self, iterable: Any = (), *args: Any, **kwargs: Any) -> None:
            self.iterable = iterable

        def __iter__(self) -> Iterator[Any]:
            return iter(self.iterable)

        def __len__(self) -> int:
            return len(self.iterable)

    module = _InertModule("tqdm")
    module.tqdm = Bar  # type: ignore[attr-defined]
    module.trange = lambda *args, **kwargs: Bar(range(*args))  # type: ignore[attr-defined]
    return module
