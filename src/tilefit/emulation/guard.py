"""Makes a PyTorch without CUDA take the device ``cuda`` for present, so that autograd and autocast run on it.

Two things are missing in a CPU build, and both are exported data that can be filled in through ctypes: the
guard that switches devices (an array of pointers in c10, one for each kind of device), and the object that
answers whether there is CUDA, how many devices and so on (its table of virtual functions is copied, and some
entries replaced). Where the entries stand is read from the header that PyTorch ships.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import sys
from typing import Any

import torch

from tilefit.errors import CaptureError

#: Numbers of devices in c10/core/DeviceType.h.
_CUDA, _PRIVATE = 1, 20
_HOOKS = "include/ATen/detail/AcceleratorHooksInterface.h"
#: More entries than any version's table of the hooks has are not copied.
_MOST_ENTRIES = 100
#: What ctypes made must live as long as PyTorch may call it.
_kept: list[Any] = []


def _library(name: str) -> ctypes.CDLL:
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", f"lib{name}.{suffix}"))


def lend() -> None:
    """Lend PyTorch a CUDA device without memory and kernels; once.

    Raises:
        CaptureError: this build of PyTorch is not one that it can be lent to.
    """
    if _kept:
        return
    if torch.version.cuda or torch.version.hip:
        raise CaptureError(
            "this PyTorch was built for GPUs, and the emulated one takes the place of theirs",
            hint="Run it where the CPU build of PyTorch is installed.",
        )
    try:
        _lend_guard()
        _lend_hooks()
    except (AttributeError, OSError, ValueError, KeyError) as error:
        raise CaptureError(
            f"PyTorch {torch.__version__} on {sys.platform} cannot be lent a GPU ({error})",
            hint="Programs run with the CPU build of PyTorch 2.9 or later on Linux; elsewhere give a "
            "factory: file.py:factory.",
        ) from error


def _lend_guard() -> None:
    """A guard written in Python is registered for the device that is there for extensions, and moved."""

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.CUDA

    guards = (ctypes.c_void_p * (_PRIVATE + 1)).in_dll(
        _library("c10"), "_ZN3c104impl26device_guard_impl_registryE"
    )
    if guards[_CUDA] or guards[_PRIVATE]:
        raise ValueError("it has a guard already")
    _kept.append(Guard())
    torch._C._acc.register_python_privateuseone_device_guard(_kept[-1])
    guards[_CUDA], guards[_PRIVATE] = guards[_PRIVATE], None


def _entries() -> dict[str, int]:
    """Where each virtual function stands in the table (Itanium ABI: a destructor takes two)."""
    with open(os.path.join(os.path.dirname(torch.__file__), _HOOKS), encoding="utf-8") as header:
        names = re.findall(r"virtual\s[^;{=]*?(~?\w+)\s*\(", header.read())
    table, number = {}, 0
    for name in names:
        table[name] = number
        number += 2 if name.startswith("~") else 1
    return table


def _lend_hooks() -> None:
    get = _library("torch_cpu")._ZN2at6detail12getCUDAHooksEv
    get.restype = ctypes.c_void_p
    pointer = ctypes.c_void_p.from_address(get())
    before = pointer.value
    assert before is not None
    size = _MOST_ENTRIES + 2  # before the functions stand an offset and the type
    table = (ctypes.c_void_p * size)(*(ctypes.c_void_p * size).from_address(before - 16))
    this, index = ctypes.c_void_p, ctypes.c_byte
    answers = {
        "isBuilt": ctypes.CFUNCTYPE(ctypes.c_bool, this)(lambda _: True),
        "isAvailable": ctypes.CFUNCTYPE(ctypes.c_bool, this)(lambda _: True),
        "hasPrimaryContext": ctypes.CFUNCTYPE(ctypes.c_bool, this, index)(lambda _, __: False),
        "deviceCount": ctypes.CFUNCTYPE(index, this)(lambda _: 1),
    }
    entries = _entries()
    for name, answer in answers.items():
        table[entries[name] + 2] = ctypes.cast(answer, ctypes.c_void_p).value
    _kept.extend((table, answers))
    pointer.value = ctypes.addressof(table) + 16

    def restore() -> None:
        pointer.value = before

    atexit.register(restore)
