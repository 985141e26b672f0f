"""A host that launches several times as slowly: run a command on one core that another process takes from it.

The other process works for as many times as long as it was left asleep, 0.3 ms, and it is scheduled at once,
since this one is nice: what the host does takes ``--times`` as long, or somewhat longer, in all its parts.
Slices as long as a step would not do, and in those of a launch, 0.05 ms, switching took most of the time.

    PYTHONPATH=src python benchmarks/slow_host.py --times 3 tilefit calibrate --quick --output slow.npz
"""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

#: Sleeps as briefly as the kernel lets it (29: PR_SET_TIMERSLACK), and works in proportion.
_OTHER = """
import ctypes, os, sys, time
ctypes.CDLL(None).prctl(29, 1000)
share, last = float(sys.argv[1]) - 1, time.perf_counter()
while os.getppid() == int(sys.argv[2]):
    time.sleep(3e-4)
    now = time.perf_counter()
    until = now + min(share * (now - last), 2e-3)
    while (last := time.perf_counter()) < until:
        pass
"""


@cache
def other(times: float) -> subprocess.Popen[bytes]:
    """The other process: one for all blocks, and where blocks differ all of them before the first, since once
    this one is nice, so is what it starts."""
    found = subprocess.Popen([sys.executable, "-c", _OTHER, str(times), str(os.getpid())])
    os.sched_setaffinity(found.pid, {max(os.sched_getaffinity(0))})
    atexit.register(found.kill)
    return found


@contextmanager
def slowed(times: float) -> Iterator[None]:
    """Within the block this process, its threads and what it starts get one core, and of it this fraction.

    PyTorch has one thread for its own work on the CPU there: several would take the core from each other. It
    stays nice afterwards, since only the superuser may undo that.
    """
    if times == 1:
        yield
        return
    import torch

    threads = torch.get_num_threads()
    before = os.sched_getaffinity(0)
    core = {max(before)}

    def pin(cores: set[int]) -> None:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)

    found = other(times)
    found.send_signal(signal.SIGCONT)
    try:
        for thread in Path("/proc/self/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)
        pin(core)
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)
        pin(before)
        found.send_signal(signal.SIGSTOP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=float, default=3.0, help="as slow a host")
    parser.add_argument("--seconds", type=float, default=120.0, help="end the command after this time")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    began_s = time.monotonic()
    with slowed(args.times):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        found = subprocess.run(args.command, env=environment, timeout=args.seconds, check=False)
    print(f"{time.monotonic() - began_s:.1f} s on a host {args.times:g} times as slow")
    sys.exit(found.returncode)


if __name__ == "__main__":
    main()
