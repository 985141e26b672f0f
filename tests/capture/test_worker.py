"""Whatever code of the user's does, it takes nothing with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tilefit.capture import worker
from tilefit.errors import CaptureError

pytestmark = pytest.mark.usefixtures("started_anew")

#: A worker without PyTorch: it runs what it is asked to.
START = """
import os, signal, subprocess, sys, threading, time
sys.path.append(sys.argv[2])
from tilefit.capture.worker import begin, leave, say, write
folder, request = begin()
exec(compile(request["code"], request["file"], "exec"))
write(folder, "result", "done")
leave()
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    monkeypatch.setattr(worker, "_START", START)

    def run(code: str, timeout_s: float = 20.0, told: Callable[[str], None] = lambda text: None) -> str:
        file = tmp_path / "program.py"
        file.write_text(code)
        with worker.working({"code": code, "file": str(file)}, told) as working:
            return working.read("result", "program.py", timeout_s)

    return run


def test_a_result_arrives_and_what_is_done_is_told(run: Callable[..., str]) -> None:
    said: list[str] = []
    assert run("say(folder, 'step 1 of 3'); time.sleep(0.2)", told=said.append) == "done"
    assert said == ["step 1 of 3"]


def test_processes_that_it_started_end_with_it(run: Callable[..., str], tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "child = os.fork() or time.sleep(60)\n"
        "other = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{child}} {{other.pid}}')\n"
    )
    started = time.monotonic()
    assert run(code) == "done"
    for pid in map(int, pids.read_text().split()):
        _until(lambda pid=pid: not _alive(pid))  # type: ignore[misc]
    assert time.monotonic() - started < 15


def test_standard_input_is_empty_for_all(run: Callable[..., str]) -> None:
    code = (
        "assert os.read(0, 1) == b''\nassert sys.stdin.read() == ''\nsubprocess.run(['cat'], check=True)\n"
        "assert os.popen('stty size').read().split() == ['24', '80']\n"  # progress bars of old ask so
    )
    assert run(code) == "done"


def test_of_much_output_the_beginning_is_shown(
    run: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    code = "for n in range(100):\n    print('x' * (1 << 20))\nprint('the end', flush=True)\n"
    assert run(code) == "done"
    printed = capfd.readouterr()
    assert printed.out == ""
    assert len(printed.err) < 100_000
    assert printed.err.endswith("the end\n")


def test_where_it_hangs_is_said(run: Callable[..., str]) -> None:
    with pytest.raises(CaptureError, match=r"program\.py did not finish within 1 s") as caught:
        run("import json\ndef wait():\n    time.sleep(60)\nwait()\n", timeout_s=1.0)
    assert caught.value.where.endswith("program.py:3")


def test_where_it_dies_is_said(run: Callable[..., str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError, match="was ended by SIGSEGV") as caught:
        run("print('last words', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    assert caught.value.where.endswith("program.py:2")
    assert "last words" in capfd.readouterr().err
    with pytest.raises(CaptureError, match="exited with status 0 before it had a result"):
        run("os._exit(0)")


def test_threads_that_go_on_do_not_keep_it(run: Callable[..., str]) -> None:
    assert run("threading.Thread(target=time.sleep, args=(60,)).start()\n") == "done"


def test_a_lock_that_an_interrupt_left_behind_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An interrupt just after ``Popen.wait`` has taken its lock leaves it taken: the next waits forever."""
    monkeypatch.setattr(worker, "_START", START)
    with worker.working({"code": "time.sleep(60)", "file": "x.py"}) as working:
        working._process._waitpid_lock.acquire()  # type: ignore[attr-defined]
    assert not _alive(working._process.pid)


def test_it_does_not_outlive_who_started_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    body = f"open({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    code = (
        "from tilefit.capture import worker\n"
        f"worker._START = {START!r}\n"
        f"code = {body!r}\n"
        "with worker.working({'code': code, 'file': 'x.py'}) as working:\n"
        "    working.read('result', 'x.py', 60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    _until(lambda: pid.exists() and bool(pid.read_text()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _until(lambda: not _alive(int(pid.read_text())))


def _until(true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def _alive(process: int) -> bool:
    """Whether a process runs; one that has ended and nobody asks after does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z" and os.path.exists(f"/proc/{process}")
