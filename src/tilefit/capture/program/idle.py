"""Noticing that a process does nothing but wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread

#: Seconds of waiting that are no pause between two calls, and the share of them that waiting takes of a core:
#: what polls takes some. Choices.
_IDLE_S, _POLLS = 10.0, 0.02


def when_idle(told: Callable[[], None]) -> None:
    """Call something, in a thread, whenever this process has used no CPU for some seconds and has no children
    that it may be waiting for."""
    Thread(target=_watch, args=(told,), daemon=True).start()


def _watch(told: Callable[[], None]) -> None:
    while True:
        used_s, start_s = time.process_time(), time.monotonic()
        time.sleep(_IDLE_S)
        waited_s = time.monotonic() - start_s
        if time.process_time() - used_s < _POLLS * waited_s and not _has_children():
            told()


def _has_children() -> bool:
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended
            if task.read_text().strip():
                return True
    return False
