"""Find a GPU by name, or the one in this machine."""

from __future__ import annotations

import difflib
import os
import re
from functools import cache

from tilefit.errors import UsageError
from tilefit.gpus.gpu import Gpu
from tilefit.gpus.load import DATA, load

# Words of drivers' and shops' names that tell no two GPUs apart.
_NOISE = re.compile(r"nvidia|tesla|geforce|generation|[^a-z0-9]")


def names() -> tuple[str, ...]:
    """The short names of the known GPUs, sorted."""
    return tuple(sorted(path.stem for path in DATA.glob("*.toml")))


def get(name: str) -> Gpu:
    """The GPU of that name.

    Case, spaces, dashes and the makers' words (``NVIDIA``, ``Tesla``, ``GeForce``) do not matter, and a few
    aliases are known: ``"h100"`` is ``h100-sxm``, ``"Tesla V100-SXM2-16GB"`` is ``v100-sxm2-16gb``. Nothing
    else is guessed: a product with a similar name is another product.

    Raises:
        UsageError: no such GPU is known; the error names the nearest one and lists all.
    """
    key = _key(name)
    by_key = _by_key()
    if key in by_key:
        return by_key[key]
    hint = f"Known: {', '.join(names())}."
    if near := difflib.get_close_matches(key, by_key, n=1):
        hint = f"Did you mean {by_key[near[0]].name}? {hint}"
    raise UsageError(f"unknown GPU {name!r}", hint=hint)


def variants(name: str) -> tuple[Gpu, ...]:
    """What else a name that is no GPU's own may mean: ``"h100"`` is ``h100-sxm``, or ``h100-pcie``."""
    taken, known = get(name), f"{re.sub('[^a-z0-9]+', '-', name.lower())}-"
    others = (get(each) for each in names() if each.startswith(known))
    return () if known == f"{taken.name}-" else tuple(gpu for gpu in others if gpu is not taken)


def local() -> Gpu | None:
    """The first GPU CUDA would use in this machine; None where there is none, or no driver or NVML binding.

    Raises:
        UsageError: there is a GPU, but its facts are not known.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if visible in ("", "-1"):
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    try:
        if not pynvml.nvmlDeviceGetCount():
            return None
        if visible.isdecimal():
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(visible))
        else:
            handle = pynvml.nvmlDeviceGetHandleByUUID(visible)
        name = pynvml.nvmlDeviceGetName(handle)
    except pynvml.NVMLError as error:
        raise UsageError(
            f"the driver cannot name GPU {visible!r}: {error}",
            hint="Check CUDA_VISIBLE_DEVICES, or name a GPU with --gpu.",
        ) from error
    finally:
        pynvml.nvmlShutdown()
    return get(name)


def _key(name: str) -> str:
    return _NOISE.sub("", name.lower())


@cache
def _by_key() -> dict[str, Gpu]:
    """Every GPU by each of its names, as :func:`_key` writes them."""
    table: dict[str, Gpu] = {}
    for name in names():
        gpu, aliases = load(DATA / f"{name}.toml")
        for known_as in (gpu.name, gpu.title, *aliases):
            if table.setdefault(_key(known_as), gpu) is not gpu:
                raise UsageError(f"{known_as!r} names two GPUs", where=f"{name}.toml")
    return table
