"""A process that can write nowhere but where it may, whatever opens the files: Linux's Landlock."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable

#: Numbers of the system calls, on every architecture, and of the option of ``prctl``.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_NO_NEW_PRIVILEGES = 38
_VERSION, _BENEATH = 1, 1
#: ``LANDLOCK_ACCESS_FS_*`` of what writes, by the version of Landlock that knows it: what writes, removes and
#: makes files; what moves them between folders; what cuts them short.
_WRITES = {1: 0b1_1111_1111_0010, 2: 1 << 13, 3: 1 << 14}
#: Of these, what a file can be given.
_OF_FILES = 1 << 1 | 1 << 14


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled", ctypes.c_uint64),)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def confine(writable: Iterable[str | os.PathLike[str]]) -> bool:
    """Let this process and all that it starts write beneath these folders alone, from now on.

    A write elsewhere fails with ``PermissionError``, or with what a library makes of it; files that are open
    stay so.

    Args:
        writable: Folders; those that are not there are passed over.

    Returns:
        Whether the system can: Linux 5.13 and later, if it was not switched off.
    """
    if platform.system() != "Linux":
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    version = call(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    if version < 1:
        return False
    rights = sum(bits for since, bits in _WRITES.items() if since <= version)
    ruleset = call(_CREATE_RULESET, ctypes.byref(_Ruleset(rights)), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return False
    try:
        for folder in filter(os.path.exists, writable):
            parent = os.open(folder, os.O_PATH)
            allowed = rights if os.path.isdir(folder) else rights & _OF_FILES
            call(_ADD_RULE, ruleset, _BENEATH, ctypes.byref(_Beneath(allowed, parent)), 0)
            os.close(parent)
        none = ctypes.c_ulong(0)
        ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, ctypes.c_ulong(1), none, none, none)
        return bool(call(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)
