"""A model file that hangs, aborts or prints takes nothing with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tilefit.capture.child import CaptureOptions, capture_in_child, capture_target, captures_in_child
from tilefit.errors import CaptureError, TargetError, UsageError

FILE = """
import os, signal, sys, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.act = act

    def forward(self, x):
        self.act()
        return self.linear(x)

def model(act):
    return Net(act), (torch.zeros(4, 8),)

def forever():
    while True:
        time.sleep(0.05)

def started():
    open(os.environ["STARTED"], "w").write(str(os.getpid()))
    forever()

fine = lambda: model(lambda: None)
prints = lambda: model(lambda: print('{"error": "noise on standard output"}', flush=True))
asks = lambda: model(lambda: sys.stdin.read())
aborts = lambda: model(os.abort)
hangs = lambda: model(forever)
waits = lambda: model(started)
leaves = lambda: model(lambda: sys.exit(3))
killed = lambda: model(lambda: os.kill(os.getpid(), signal.SIGSEGV))
out_of_memory = lambda: model(lambda: os.kill(os.getpid(), signal.SIGKILL))
branches = lambda: model(lambda: bool(torch.rand(1, device="meta")))
moves = lambda: model(lambda: os.chdir("/"))
"""
OPTIONS = CaptureOptions(optimizer="sgd", amp="bf16")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net_of_child.py"
    path.write_text(FILE, encoding="utf-8")
    return path


def test_the_child_s_step_is_the_one_captured_here(file: Path) -> None:
    assert capture_in_child(f"{file}:fine", OPTIONS) == capture_target(f"{file}:fine", OPTIONS)


def test_one_child_captures_several_times_and_a_failure_is_one_of_them(file: Path) -> None:
    options = [
        CaptureOptions(inputs=(f"float32[{rows},{width}]",)) for rows, width in ((2, 8), (2, 9), (6, 8))
    ]
    first, failed, last = captures_in_child(f"{file}:fine", options)
    assert first == capture_target(f"{file}:fine", options[0])
    assert isinstance(failed, CaptureError)
    assert "shapes" in failed.hint
    assert last == capture_target(f"{file}:fine", options[2])


def test_a_child_that_dies_between_captures_is_told(file: Path) -> None:
    captures = captures_in_child(f"{file}:killed", [OPTIONS, OPTIONS])
    with pytest.raises(CaptureError, match="ended by SIGSEGV"):
        next(captures)


def test_all_options_reach_the_capture(file: Path) -> None:
    options = CaptureOptions(
        inputs=("float32[6,8]",), train=True, amp="fp16", tf32=True, optimizer="adamw", fused_optimizer=True,
        channels_last=True, compiled=True,
    )  # fmt: skip
    step = capture_in_child(f"{file}:fine", options)
    assert step.inputs == ("0: float32[6,8]",)
    settings = step.settings
    assert (settings.amp, settings.tf32, settings.optimizer) == ("fp16", True, "adamw")
    assert settings.fused_optimizer
    assert settings.channels_last
    assert settings.compiled


def test_what_the_model_prints_does_not_reach_standard_output(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert capture_in_child(f"{file}:prints", OPTIONS).ops
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "noise" in printed.err


@pytest.mark.parametrize("name", ["asks", "moves"])
def test_a_model_may_read_and_move_about(file: Path, name: str) -> None:
    assert capture_in_child(f"{file}:{name}", OPTIONS, timeout_s=60).ops


def test_a_process_that_the_system_ends_has_probably_run_out_of_memory(file: Path) -> None:
    with pytest.raises(CaptureError, match="was ended by SIGKILL") as caught:
        capture_in_child(f"{file}:out_of_memory", OPTIONS)
    assert "smaller batch" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aborts", "was ended by SIGABRT"),
        ("killed", "was ended by SIGSEGV"),
        ("leaves", "exited with status 3"),
    ],
)
def test_a_model_that_ends_the_process_is_told(file: Path, name: str, message: str) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        capture_in_child(f"{file}:{name}", OPTIONS)
    assert caught.value.hint


def test_a_model_that_hangs_is_ended(file: Path) -> None:
    with pytest.raises(CaptureError, match="did not finish within 4 s") as caught:
        capture_in_child(f"{file}:hangs", OPTIONS, timeout_s=4)
    assert "--timeout" in caught.value.hint


def test_errors_arrive_whole(file: Path) -> None:
    with pytest.raises(CaptureError, match="reads a tensor's value") as caught:
        capture_in_child(f"{file}:branches", OPTIONS)
    assert "net_of_child.py:" in caught.value.where
    assert "--on-cpu" in caught.value.hint
    with pytest.raises(TargetError, match="has no 'fein'"):
        capture_in_child(f"{file}:fein", OPTIONS)
    with pytest.raises(UsageError, match="unknown element type"):
        capture_in_child(f"{file}:fine", CaptureOptions(inputs=("x: int65[2]",)))


def test_an_interrupt_ends_the_child_too(file: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    program = (
        "from tilefit.capture.child import CaptureOptions, capture_in_child\n"
        f"capture_in_child({json.dumps(f'{file}:waits')}, CaptureOptions())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "STARTED": str(started)}, stderr=subprocess.PIPE
    )
    try:
        _until(started.exists)
        _until(lambda: bool(started.read_text()))
        parent.send_signal(signal.SIGINT)
        _, complaint = parent.communicate(timeout=30)
        assert b"KeyboardInterrupt" in complaint
        child = int(started.read_text())
        _until(lambda: not _alive(child))
    finally:
        parent.kill()


def _until(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
