"""Find a GPU by name, or the one in this machine."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from functools import cache
from typing import Any

from tilefit.errors import UsageError
from tilefit.gpus.gpu import Gpu
from tilefit.gpus.load import DATA, load

# Words of drivers' and shops' names that tell no two GPUs apart.
_NOISE = re.compile(r"nvidia|tesla|geforce|generation|[^a-z0-9]")
_LAPTOP = re.compile(r"laptop|mobile|max-?q")
# An instance of MIG, such as "NVIDIA H100 80GB HBM3 MIG 3g.40gb", or a virtual GPU, such as "GRID A100-10C".
_PART = re.compile(r"\b(mig|grid)\b|-\d+[abcq]$")
_PART_HINT = (
    "A part of a GPU (MIG, vGPU) has fewer SMs, or all of them in turns, and less memory and bandwidth: "
    "name a GPU that comes close. "
)
# The last part of the name of a product that is sold with more than one size of memory.
_MEMORY = re.compile(r"-\d+gb$")
# What error correction and the driver keep of it, at most, and the host of memory that it shares.
_KEPT_MEMORY = 0.15


def names() -> tuple[str, ...]:
    """The short names of the known GPUs, sorted."""
    return tuple(sorted(gpu.name for gpu, _ in _all()))


def get(name: str) -> Gpu:
    """The GPU of that name.

    Case, spaces, dashes and the makers' words (``NVIDIA``, ``Tesla``, ``GeForce``) do not matter, and a few
    aliases are known: ``"h100"`` is ``h100-sxm``, ``"Tesla V100-SXM2-16GB"`` is ``v100-sxm2-16gb``. Nothing
    else is guessed: a product with a similar name is another product.

    Raises:
        UsageError: no such GPU is known; the error names the nearest ones.
    """
    key = _key(name)
    by_key = _by_key()
    if key in by_key:
        return by_key[key]
    near = dict.fromkeys(by_key[each].name for each in difflib.get_close_matches(key, by_key))
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    if _LAPTOP.search(name.lower()):
        laptops = ", ".join(each for each in names() if each.endswith("-laptop"))
        hint = (
            "A laptop's GPU has fewer SMs, less memory and a lower clock than the card of the same number: "
            f"name one that comes close. Those of laptops: {laptops}. "
        )
    elif _PART.search(name.lower()):
        hint = _PART_HINT
    hint += "All that are known: tilefit gpu."
    raise UsageError(f"unknown GPU {name!r}", hint=hint)


def variants(name: str) -> tuple[Gpu, ...]:
    """What else a name may mean: ``"h100"`` is ``h100-sxm``, or ``h100-pcie``; ``"3080"`` has 10 GB or 12."""
    taken, key = get(name), _key(name)
    others = {each for each in names() if key in _beginnings(each) and key != _key(taken.name)}
    if not _MEMORY.search(re.sub("[^a-z0-9]+", "-", name.lower())):
        others |= {gpu.name for gpu in _of_product(taken)}
    return tuple(get(each) for each in sorted(others - {taken.name}))


def _beginnings(name: str) -> list[str]:
    """What a short name begins with, up to a dash, as :func:`_key` writes it."""
    parts = name.split("-")
    return [_key("".join(parts[:count])) for count in range(1, len(parts))]


def of_device(name: str, memory_bytes: int) -> Gpu:
    """The GPU a driver calls so, of what is sold under that name the one with so much memory.

    Raises:
        UsageError: no such GPU is known, or none of that name with so much memory.
    """
    gpu = min(_of_product(get(name)), key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))
    if _holds(gpu, memory_bytes):
        return gpu
    alike = [
        each.name
        for each in map(get, names())
        if each.compute_capability == gpu.compute_capability and _holds(each, memory_bytes)
    ]
    hint = f"Name the GPU with --gpu. Alike, with as much memory: {', '.join(alike) or 'none'}."
    raise UsageError(
        f"the driver names {name!r}, with {memory_bytes / 2**30:.1f} GiB: not the {gpu.title}", hint=hint
    )


def _of_product(gpu: Gpu) -> list[Gpu]:
    """A GPU and those that only the memory in their names tells apart from it."""
    product = _MEMORY.sub("", gpu.name)
    return [get(name) for name in names() if _MEMORY.sub("", name) == product]


def _holds(gpu: Gpu, memory_bytes: int) -> bool:
    return abs(gpu.memory_bytes - memory_bytes) <= _KEPT_MEMORY * gpu.memory_bytes


#: Prints the bus address of the GPU that CUDA takes first, as ``CUDA_VISIBLE_DEVICES`` and
#: ``CUDA_DEVICE_ORDER`` say. In a process of its own: a child of one that has called CUDA cannot.
_FIRST_OF_CUDA = """
import ctypes, os
cuda = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
device, address = ctypes.c_int(), ctypes.create_string_buffer(32)
failed = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
raise SystemExit(failed or cuda.cuDeviceGetPCIBusId(address, 32, device) or print(address.value.decode()))
"""


def local() -> Gpu | None:
    """The first GPU CUDA would use in this machine; None where there is none, or no driver or NVML binding.

    Raises:
        UsageError: there is a GPU, but its facts are not known, or MIG divides it.
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
        handle = _handle(pynvml, visible)
        name, memory_bytes = pynvml.nvmlDeviceGetName(handle), _memory_bytes(pynvml, handle)
        divided = _is_divided(pynvml, handle)
    except pynvml.NVMLError as error:
        raise UsageError(
            f"the driver cannot name GPU {visible!r}: {error}",
            hint="Check CUDA_VISIBLE_DEVICES, or name a GPU with --gpu.",
        ) from error
    finally:
        pynvml.nvmlShutdown()
    if divided:
        # NVML names the whole GPU, CUDA uses an instance.
        raise UsageError(f"MIG divides GPU {visible!r}, {name}", hint=f"{_PART_HINT}Name it with --gpu.")
    return of_device(name, memory_bytes)


def _handle(pynvml: Any, visible: str) -> Any:
    """NVML's handle of an entry of ``CUDA_VISIBLE_DEVICES``, perhaps the beginning of an identifier. NVML
    numbers GPUs by their place on the bus, CUDA by their speed unless ``CUDA_DEVICE_ORDER`` is that."""
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    if not visible.isdecimal():
        fitting = [each for each in handles if pynvml.nvmlDeviceGetUUID(each).startswith(visible)]
        return fitting[0] if fitting else pynvml.nvmlDeviceGetHandleByUUID(visible)
    alike = len({pynvml.nvmlDeviceGetName(each) for each in handles}) == 1
    if alike or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return pynvml.nvmlDeviceGetHandleByIndex(int(visible))
    asked = subprocess.run(
        [sys.executable, "-c", _FIRST_OF_CUDA], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        raise UsageError(
            "this machine has GPUs of several kinds, and CUDA does not say which of them it takes first",
            hint="Set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name a GPU with --gpu.",
        )
    return pynvml.nvmlDeviceGetHandleByPciBusId(asked.stdout.strip())


def _memory_bytes(pynvml: Any, handle: object) -> int:
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError_NotSupported:  # it shares the host's
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _is_divided(pynvml: Any, handle: object) -> bool:
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return False
    return bool(current)


def _key(name: str) -> str:
    return _NOISE.sub("", name.lower())


@cache
def _all() -> list[tuple[Gpu, tuple[str, ...]]]:
    """Every GPU with its aliases."""
    return [each for path in sorted(DATA.glob("*.toml")) for each in load(path)]


@cache
def _by_key() -> dict[str, Gpu]:
    """Every GPU by each of its names, as :func:`_key` writes them."""
    table: dict[str, Gpu] = {}
    for gpu, aliases in _all():
        for known_as in (gpu.name, gpu.title, *aliases):
            if table.setdefault(_key(known_as), gpu) is not gpu:
                raise UsageError(f"{known_as!r} names two GPUs", where=gpu.name)
    return table
