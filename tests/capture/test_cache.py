"""Captured steps on disk: found again while nothing that they depend on has changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tilefit.capture import child
from tilefit.capture.child import capture_in_child
from tilefit.ops import Step
from tilefit.options import TargetOptions

_MODEL = """
import json, os
import torch
from widths import WIDTH

def build():
    width = WIDTH + json.load(open("size.json")) + int(os.environ.get("EXTRA_WIDTH", "0"))
    try:
        width += int(open("more.txt").read())
    except FileNotFoundError:
        pass
    return torch.nn.Linear(width, 8), torch.empty(4, width)
"""
OPTIONS = TargetOptions(optimizer="none")
Capture = Callable[..., Step]


@pytest.fixture
def captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Capture:
    """Captures a model of 4 features, with a cache of its own; ``child_starts`` counts processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EXTRA_WIDTH", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model.py").write_text(_MODEL)
    (tmp_path / "widths.py").write_text("WIDTH = 3\n")
    (tmp_path / "size.json").write_text("1")
    return lambda options=OPTIONS, **more: capture_in_child("model.py:build", options, **more)


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, starting a process is an error."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    return lambda: monkeypatch.setattr(child.subprocess, "Popen", forbidden)


def width(step: Step) -> int:
    return step.parameters["weight"].shape[1]


def test_an_unchanged_target_is_not_captured_again(captured: Capture, no_child: Callable[[], None]) -> None:
    first = captured()
    no_child()
    assert captured() == first


def change_the_file() -> None:
    Path("model.py").write_text(_MODEL.replace("width, 8", "width, 9"))


def change_an_import() -> None:
    Path("widths.py").write_text("WIDTH = 4\n")  # of the same length


def change_what_it_reads() -> None:
    Path("size.json").write_text("2")


def make_what_it_missed() -> None:
    Path("more.txt").write_text("5")


def set_what_it_asked_for() -> None:
    os.environ["EXTRA_WIDTH"] = "7"  # taken back by the fixture


@pytest.mark.parametrize(
    "change",
    [change_the_file, change_an_import, change_what_it_reads, make_what_it_missed, set_what_it_asked_for],
)
def test_what_the_step_depends_on_is_looked_at(captured: Capture, change: Callable[[], None]) -> None:
    first = captured()
    change()
    assert captured() != first
    assert captured() == captured(fresh=True)


def test_other_options_are_another_step(captured: Capture) -> None:
    assert captured(TargetOptions(optimizer="none", train=False)) != captured()


def test_fresh_captures_again(captured: Capture, no_child: Callable[[], None]) -> None:
    captured()
    no_child()
    with pytest.raises(AssertionError, match="a process was started"):
        captured(fresh=True)


def test_a_damaged_file_is_made_anew(captured: Capture, tmp_path: Path) -> None:
    first = captured()
    (file,) = (tmp_path / "cache" / "tilefit" / "captures").iterdir()
    for content in ("", "{}\n{}", file.read_text()[:-20], "no JSON\n{}"):
        file.write_text(content)
        assert captured() == first


def test_a_folder_that_cannot_be_written_costs_time_alone(
    captured: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert width(captured()) == 4
    assert width(captured()) == 4


def test_tried_changes_are_not_kept(captured: Capture, tmp_path: Path) -> None:
    sources = {str(tmp_path / "widths.py"): "WIDTH = 9\n"}
    tried = captured(TargetOptions(optimizer="none", sources=sources))
    assert width(tried) == 10
    assert not (tmp_path / "cache").exists()
    assert width(captured()) == 4


def test_a_variable_is_not_written_down(
    captured: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXTRA_WIDTH", "123456")
    captured()
    (file,) = (tmp_path / "cache" / "tilefit" / "captures").iterdir()
    first, _, _ = file.read_text().partition("\n")
    assert "EXTRA_WIDTH" in first
    assert "123456" not in first
