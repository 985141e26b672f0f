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

import tilefit
from tilefit.capture.child import capture_in_child, capture_target, captures_in_child
from tilefit.errors import CaptureError, TargetError, TilefitError, UsageError
from tilefit.ops import Step
from tilefit.options import TargetOptions

FILE = """
import argparse, os, signal, sys, time
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
parses = lambda: model(lambda: argparse.ArgumentParser().parse_args())
"""
OPTIONS = TargetOptions(optimizer="sgd", amp="bf16")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net_of_child.py"
    path.write_text(FILE, encoding="utf-8")
    return path


@pytest.mark.usefixtures("started_anew")
def test_the_child_s_step_is_the_one_captured_here(file: Path) -> None:
    assert capture_in_child(f"{file}:fine", OPTIONS) == capture_target(f"{file}:fine", OPTIONS)


def test_one_child_captures_several_times_and_a_failure_is_one_of_them(file: Path) -> None:
    options = [TargetOptions(input=(f"float32[{rows},{width}]",)) for rows, width in ((2, 8), (2, 9), (6, 8))]
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
    options = TargetOptions(
        input=("float32[6,2,2,8]",), train=True, amp="fp16", tf32=True, optimizer="adamw",
        fused_optimizer=True, channels_last=True, compile=True,
    )  # fmt: skip
    step = capture_in_child(f"{file}:fine", options)
    assert step.inputs == ("0: float32[6,2,2,8]",)
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


@pytest.mark.parametrize("name", ["asks", "moves", "parses"])
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
        capture_in_child(f"{file}:fine", TargetOptions(input=("x: int65[2]",)))


def test_an_interrupt_ends_the_child_too(file: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    program = (
        "from tilefit.capture.child import capture_in_child\n"
        "from tilefit.options import TargetOptions\n"
        f"capture_in_child({json.dumps(f'{file}:waits')}, TargetOptions())\n"
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


# ---- files called like modules of the standard library -----------------------------------------

_OWN = "import torch\ndef build():\n    return torch.nn.Linear(8, 8), (torch.zeros(4, 8),)\n"


#: Some that Python starts with, that PyTorch needs, that are written in C.
_CALLED_LIKE = ("random", "types", "select", "json", "statistics")


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files that are called like modules of Python."""
    for name in _CALLED_LIKE:
        (tmp_path / f"{name}.py").write_text(_OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", _CALLED_LIKE)
def test_a_file_may_be_called_like_a_module_of_python(beside: Path, name: str) -> None:
    assert capture_in_child(f"{name}.py:build", OPTIONS).model == f"{name}.py:build"


@pytest.mark.usefixtures("started_anew")
def test_the_users_code_finds_the_files_beside_it(beside: Path) -> None:
    # As with ``python train.py``: what nothing has imported yet is theirs.
    (beside / "this.py").write_text(_OWN)
    (beside / "train.py").write_text("from this import build\n")
    assert capture_in_child("train.py:build", OPTIONS).ops


@pytest.mark.usefixtures("beside")
def test_a_module_that_python_has_is_told_from_the_users() -> None:
    with pytest.raises(TargetError) as caught:
        capture_in_child("select:build", OPTIONS)
    assert caught.value.hint == "select is a module that Python has, not your file: write select.py:build."


def test_the_command_is_found_beside_such_a_file(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text(_OWN)
    ran = subprocess.run(
        [sys.executable, "-m", "tilefit", "check", "random.py:build", "--gpu", "h200"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(tilefit.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode < 2, ran.stderr
    assert ran.stdout.startswith("random.py:build")


# ---- more tokens than a configuration is for ---------------------------------------------------

_SMALL = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def _of_config(folder: Path, seq: int | None, **values: object) -> Step:
    path = folder / "config.json"
    path.write_text(json.dumps({**_SMALL, "intermediate_size": 16, "max_position_embeddings": 16, **values}))
    return capture_target(f"hf:{path}", TargetOptions(batch=2, seq=seq))


@pytest.mark.parametrize(
    ("model_type", "most", "what"),
    [
        ("gpt2", 16, "row 16 of transformer.wpe.weight is looked up, and it has rows 0 to 15"),
        ("opt", 16, "row 18 of model.decoder.embed_positions.weight"),
        ("bert", 16, "The expanded size of the tensor"),
        ("roberta", 14, "15 tokens are too long: the configuration is for at most 14 tokens"),
    ],
)
def test_more_tokens_than_learned_positions_are_refused(
    tmp_path: Path, model_type: str, most: int, what: str
) -> None:
    values = {"model_type": model_type, "pad_token_id": 1}
    assert _of_config(tmp_path, None, **values).inputs[0] == f"input_ids: int64[2,{most}]"
    with pytest.raises(TilefitError, match=what) as caught:
        _of_config(tmp_path, most + 1, **values)
    assert f"Take --seq {most} or less (max_position_embeddings of the configuration)" in caught.value.hint


def test_inputs_that_were_made_are_named_where_the_model_wants_others(tmp_path: Path) -> None:
    path = tmp_path / "odd_channels.py"
    path.write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n    def forward(self, x):\n        return super().forward(x[:, :3])\n"
        "build = lambda: Net(nn.Conv2d(4, 8, 3))\n"
    )
    with pytest.raises(CaptureError) as caught:
        capture_target(f"{path}:build", TargetOptions(batch=2, image_size=8))
    assert caught.value.hint.startswith(
        "The inputs were made for it here: 0: float32[2,4,8,8]. Where it wants"
    )
    with pytest.raises(CaptureError) as caught:
        capture_target(f"{path}:build", TargetOptions(input=("float32[2,4,8,8]",)))
    assert caught.value.hint.startswith("Check the shapes and element types of the inputs (--input)")


def test_rotary_positions_go_on_with_a_note(tmp_path: Path) -> None:
    note = "Longer than trained for: the configuration is for at most 16 tokens (max_position_embeddings)."
    assert note in _of_config(tmp_path, 17, model_type="llama").notes
    assert note not in _of_config(tmp_path, 16, model_type="llama").notes
