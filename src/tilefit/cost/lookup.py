"""Which profile the estimates for a GPU rest on: a file that was named, the user's own, or one that ships."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from math import inf
from pathlib import Path

from tilefit.cost.calibrated import DAMAGED, Profile, load, read
from tilefit.errors import TilefitError
from tilefit.gpus import Gpu
from tilefit.paths import corrupt_name, data_folder

_NAMED: ContextVar[Profile | None] = ContextVar("profile", default=None)


@contextmanager
def using(path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Within the block, estimates for the GPU of a profile's file rest on it; None changes nothing.

    Kinds of operations that the file does not know are taken from the profile that ships.

    Raises:
        TilefitError: the file cannot be read, or is no profile.
    """
    if path is None:
        yield
        return
    own = read(Path(path))
    token = _NAMED.set(_joined(own, _shipped(own.about["gpu"]), own.networks.keys()))
    try:
        yield
    finally:
        _NAMED.reset(token)


def named_gpu() -> str | None:
    """The GPU of the file named in :func:`using`."""
    named = _NAMED.get()
    return named.about["gpu"] if named else None


def user_path(gpu: str) -> Path:
    """Where ``tilefit calibrate`` keeps the profile of a GPU, by its short name."""
    return data_folder() / "profiles" / f"{gpu}.npz"


def profile(gpu: Gpu) -> Profile | None:
    """The profile in use for a GPU; None where nobody has measured it.

    Raises:
        TilefitError: the profile's file is damaged. The user's own is then set aside, so that the next call
            goes on without it.
    """
    named = _NAMED.get()
    if named is not None and named.about["gpu"] == gpu.name:
        return named
    path = user_path(gpu.name)
    try:
        changed_ns = os.stat(path).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return _shipped(gpu.name)
    except OSError:
        changed_ns = 0  # reading it will say what is wrong
    return _users(path, changed_ns, gpu.name)


def title(gpu: Gpu) -> str:
    """Where the measurements of a GPU are from; empty where there are none."""
    found = profile(gpu)
    return found.title if found else ""


def shipped(gpu: Gpu) -> Profile | None:
    """The profile that ships for a GPU."""
    return _shipped(gpu.name)


def keep(path: Path) -> Path | None:
    """Before a profile is written: move a file that is there and is no sound profile; returns where to.

    Raises:
        TilefitError: what is there cannot be read.
    """
    try:
        load(path)
    except FileNotFoundError:
        return None
    except OSError:
        read(path)  # says so
    except DAMAGED:
        return _set_aside(path)
    return None


def _set_aside(path: Path) -> Path:
    return path.rename(corrupt_name(path))


@lru_cache(maxsize=64)
def _shipped(gpu: str) -> Profile | None:
    path = resources.files("tilefit.cost") / "data" / f"{gpu}.npz"
    return read(path) if path.is_file() else None


@lru_cache(maxsize=64)
def _users(path: Path, changed_ns: int, gpu: str) -> Profile:
    """The user's own profile, without the kinds that the shipped one predicted better when it was made."""
    try:
        own = load(path)
        if own.about["gpu"] != gpu:
            raise ValueError(f"it is one of the GPU {own.about['gpu']}")
    except OSError:
        own = read(path)  # says so
    except DAMAGED as error:
        aside = _set_aside(path)
        raise TilefitError(
            f"the profile of this GPU cannot be used: {error}",
            where=str(path),
            hint=f"It was moved to {aside.name}. Run the command again to go on without it, or make a new "
            "one: tilefit calibrate.",
        ) from error
    errors = {kind: facts.get("errors", {}) for kind, facts in own.about["networks"].items()}
    better = [kind for kind, e in errors.items() if e.get("calibrated", 0.0) < e.get("shipped", inf)]
    return _joined(own, _shipped(gpu), better)


def _joined(own: Profile, shipped: Profile | None, kinds: Iterable[str]) -> Profile:
    """A profile with these kinds, and what else the shipped one knows."""
    mine = {kind: own.networks[kind] for kind in kinds}
    theirs = {kind: net for kind, net in (shipped.networks if shipped else {}).items() if kind not in mine}
    title = own.title
    if shipped and theirs:
        title = f"{_listed(mine)} {own.title}; {_listed(theirs)} {shipped.title}" if mine else shipped.title
    return replace(own, networks=mine | theirs, title=title)


def _listed(networks: Iterable[str]) -> str:
    return ", ".join(networks)
