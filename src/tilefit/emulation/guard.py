"""Makes PyTorch take the device ``cuda`` for present, so that autograd and autocast run on it.

Two objects of PyTorch's answer for a device, and both can be replaced as data: the guard that switches
devices and streams (an array in c10 has one for each kind of device), and the hooks that say whether there is
CUDA, how many devices and so on. In a build without CUDA the first is missing and the second says no; in a
build with CUDA both would ask the driver.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import platform
import re
import sys
from typing import Any

import torch

from tilefit.errors import CaptureError

#: The number of the device in c10/core/DeviceType.h.
_CUDA = 1
#: Machine code of a function that returns 1, and 0 in the second register of a result. By the calling
#: convention that is true, one device, the kind of device CUDA, a ``c10::Device`` (a byte of kind, a byte of
#: index: cuda:0) and a ``c10::Stream`` (a device, and the number of the default stream): whatever a guard is
#: asked.
_RETURN_1 = {
    "x86_64": bytes.fromhex("b801000000 31d2 c3"),  # mov eax, 1; xor edx, edx; ret
    "aarch64": bytes.fromhex("200080d2 010080d2 c0035fd6"),  # mov x0, 1; mov x1, 0; ret
}
_HOOKS = "include/ATen/detail/AcceleratorHooksInterface.h"
#: More entries than any version's tables of virtual functions have are not filled.
_MOST_ENTRIES = 100
#: What PyTorch may use until the process ends, after Python has.
_kept: list[Any] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


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
    try:
        yes = _returns_1()
        _lend_guard(yes)
        _lend_hooks(yes)
    except (AttributeError, OSError, TypeError, ValueError, KeyError) as error:
        raise CaptureError(
            f"PyTorch {torch.__version__} on {sys.platform} cannot be lent a GPU ({error})",
            hint="Programs run with PyTorch 2.9 or later on Linux; elsewhere give a factory: "
            "file.py:factory.",
        ) from error


def _returns_1() -> int:
    """The address of a function that returns 1."""
    code = _RETURN_1[{"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())]
    page = mmap.mmap(-1, mmap.PAGESIZE)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(
        ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC
    ):
        raise OSError(ctypes.get_errno(), "no memory may be made executable")
    _kept.append(page)
    return address


def _lend_guard(yes: int) -> None:
    """A guard without state, whose every function is the same."""
    functions = (ctypes.c_void_p * _MOST_ENTRIES)(*[yes] * _MOST_ENTRIES)
    guard = ctypes.c_void_p(ctypes.addressof(functions))
    _kept.extend((functions, guard))
    guards = (ctypes.c_void_p * (_CUDA + 1)).in_dll(
        _library("c10"), "_ZN3c104impl26device_guard_impl_registryE"
    )
    guards[_CUDA] = ctypes.addressof(guard)


def _entries() -> dict[str, int]:
    """Where each virtual function of the hooks stands in their table (Itanium: a destructor takes two)."""
    with open(os.path.join(os.path.dirname(torch.__file__), _HOOKS), encoding="utf-8") as header:
        names = re.findall(r"virtual\s[^;{=]*?(~?\w+)\s*\(", header.read())
    table, number = {}, 0
    for name in names:
        table[name] = number
        number += 2 if name.startswith("~") else 1
    return table


def _lend_hooks(yes: int) -> None:
    get = _library("torch_cpu")._ZN2at6detail12getCUDAHooksEv
    get.restype = ctypes.c_void_p
    pointer = ctypes.c_void_p.from_address(get())
    before = pointer.value
    assert before is not None
    size = _MOST_ENTRIES + 2  # before the functions stand an offset and the type
    table = (ctypes.c_void_p * size)(*(ctypes.c_void_p * size).from_address(before - 16))
    no = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_byte)(lambda *_: False)
    entries = _entries()
    for name in ("isBuilt", "isAvailable", "deviceCount", "init"):
        table[entries[name] + 2] = yes
    table[entries["hasPrimaryContext"] + 2] = ctypes.cast(no, ctypes.c_void_p).value
    _kept.extend((table, no))
    pointer.value = ctypes.addressof(table) + 16

    def restore() -> None:
        pointer.value = before

    atexit.register(restore)
