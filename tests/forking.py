"""Workers forked off a process that has imported PyTorch: they start at once, and are as new otherwise.

What a worker's own start does is tested where a test asks for it, with the fixture ``started_anew``.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

from tilefit.capture import worker

#: What starts users' workers.
ANEW = worker.start
_SOURCE = str(Path(worker.__file__).parents[2])
#: ``prctl(PR_SET_CHILD_SUBREAPER)``: what loses its parent becomes a child of this process.
_ADOPT = 36
#: Forks twice for each request: who asks adopts the second process, which alone is left.
_SERVER = """
import gc, json, os, socket, sys
sys.path.append(sys.argv[2])
import torch._dynamo, transformers
import tilefit.capture.program.function, tilefit.capture.program.run
import tilefit.capture.run, tilefit.capture.semantic, tilefit.capture.targets
from tilefit.capture.child import main
gc.freeze()
asking = socket.socket(fileno=int(sys.argv[1]))
asking.sendall(b"ready")
while True:
    request, files, _, _ = socket.recv_fds(asking, 1 << 20, 2)
    if not request:
        os._exit(0)
    reading, writing = os.pipe()
    between = os.fork()
    if not between:
        worker = os.fork()
        if worker:
            os.write(writing, str(worker).encode())
            os._exit(0)
        break
    os.waitpid(between, 0)
    asking.sendall(os.read(reading, 32))
    for file in (reading, writing, *files):
        os.close(file)
os.setsid()
for file, place in zip((*files, files[1]), (0, 1, 2)):
    os.dup2(file, place)
for file in (reading, writing, *files):
    os.close(file)
asking.close()
request = json.loads(request)
os.environ.clear()
os.environ.update(request["environment"])
os.chdir(request["folder"])
sys.argv[1:] = request["arguments"]
main()
"""


class Forked:
    """A worker's process, as far as :class:`~tilefit.capture.worker.Worker` needs a ``Popen`` of it."""

    def __init__(self, server: socket.socket, arguments: list[str], printed: int) -> None:
        request = {"environment": dict(os.environ), "folder": os.getcwd(), "arguments": arguments}
        reading, writing = os.pipe()
        adopts = ctypes.CDLL(None).prctl
        adopts(_ADOPT, 1, 0, 0, 0)
        try:
            socket.send_fds(server, [json.dumps(request).encode()], [reading, printed])
            self.pid = int(server.recv(32))
        finally:
            adopts(_ADOPT, 0, 0, 0, 0)
            os.close(reading)
        self.stdin = os.fdopen(writing, "wb")
        self.returncode: int | None = None


@cache
def _server() -> socket.socket:
    """The process that forks; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.Popen(
        [sys.executable, "-P", "-c", _SERVER, str(theirs.fileno()), _SOURCE],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    theirs.close()
    assert ours.recv(32) == b"ready"
    return ours


def start(folder: str, printed: int) -> Forked:
    """Takes the place of :func:`tilefit.capture.worker.start`."""
    return Forked(_server(), [folder, _SOURCE], printed)
