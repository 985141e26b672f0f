"""Arrays and checkpoints in files that are not there."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from tilefit.capture.program.fake_data import made
from tilefit.capture.program.fake_data.sources import Sources, asked_by_user, is_prepared
from tilefit.capture.program.late import Change
from tilefit.capture.sites import short_path


def changes(sources: Sources) -> dict[str, Change]:
    """Answers NumPy and PyTorch."""
    return {
        "numpy": lambda module: _numpy(sources, module),
        "torch.serialization": lambda module: _torch(sources, module),
    }


def _wanted(*args: Any, **kwargs: Any) -> bool:
    return asked_by_user() and not is_prepared()


def _numpy(sources: Sources, numpy: ModuleType) -> None:
    def flat(file: Any, dtype: Any = None, count: int = -1, **kwargs: Any) -> Any:
        values = made.tokens(count if count > 0 else made.TOKENS, dtype or float)
        what = f"{len(values):,} random values of {values.dtype}"
        sources.state(
            _file(file), what + (f" below {made.TOKEN_VALUES}" if values.dtype.kind in "iu" else "")
        )
        return values

    def memmap(
        kind: Any, file: Any, dtype: Any = "uint8", mode: str = "r+", *args: Any, **kwargs: Any
    ) -> Any:
        shape = kwargs.get("shape", args[1] if len(args) > 1 else None)
        if shape is None:
            return flat(file, dtype)
        sizes = shape if isinstance(shape, tuple) else (shape,)
        pattern = flat(file, dtype)
        return (
            numpy.broadcast_to(pattern[: sizes[-1]], sizes)
            if len(sizes) > 1
            else numpy.resize(pattern, sizes)
        )

    def load(file: Any, *args: Any, **kwargs: Any) -> Any:
        return flat(file, numpy.uint16)

    sources.answer(numpy.memmap, "__new__", lambda kind, file, *a, **k: _file(file), memmap, when=_wanted)
    sources.answer(numpy, "fromfile", lambda file, *a, **k: _file(file), flat, when=_wanted)
    for name in ("genfromtxt", "loadtxt"):
        read = getattr(numpy, name)
        sources.answer(numpy, name, lambda file, *a, **k: _file(file), _reading(sources, read), when=_wanted)
    sources.answer(numpy, "load", lambda file, *a, **k: _file(file), load, when=_wanted)


def _reading(sources: Sources, read: Any) -> Any:
    """Reads a file again once it has been made, if it can be."""

    def again(file: Any, *args: Any, **kwargs: Any) -> Any:
        sources.make(os.fspath(file))
        with open(file) as made_up:  # NumPy has a reference of its own to open
            return read(made_up, *args, **kwargs)

    return again


def _torch(sources: Sources, serialization: ModuleType) -> None:
    import torch

    def load(file: Any, *args: Any, **kwargs: Any) -> Any:
        sources.state(fetched.get(file) or _file(file), "a checkpoint that leaves weights as they are")
        return Checkpoint()

    def into(module: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(state, Checkpoint):
            return torch.nn.modules.module._IncompatibleKeys([], [])
        return load_state(module, state, *args, **kwargs)

    def into_optimizer(optimizer: Any, state: Any) -> None:
        if not isinstance(state, Checkpoint):
            load_optimizer(optimizer, state)

    load_state, load_optimizer = torch.nn.Module.load_state_dict, torch.optim.Optimizer.load_state_dict
    sources.replace(torch.nn.Module, "load_state_dict", into)
    sources.replace(torch.optim.Optimizer, "load_state_dict", into_optimizer)

    def fetch(url: str, file: str, *args: Any, **kwargs: Any) -> None:
        fetched[file] = url

    def wanted(file: Any, *args: Any, **kwargs: Any) -> bool:
        return file in fetched or _wanted()

    fetched: dict[Any, str] = {}  # pretrained weights of torchvision and of torch.hub
    sources.answer(torch.hub, "download_url_to_file", lambda url, *a, **k: url, fetch)
    sources.answer(torch.hub, "list", lambda repo, *a, **k: repo, lambda repo, *a, **k: [])
    sources.answer(torch, "load", lambda file, *a, **k: _file(file), load, when=wanted)


class Checkpoint(dict[str, Any]):
    """Any state of any module: each of its entries is one as well."""

    def __missing__(self, key: str) -> Checkpoint:
        return Checkpoint()

    def __contains__(self, key: object) -> bool:
        return False


def _file(file: Any) -> str:
    return short_path(os.path.abspath(file)) if isinstance(file, str | os.PathLike) else str(file)
