"""Captured steps on disk: found again while nothing that they depend on has changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilefit.capture import worker
from tilefit.capture.cache import recall
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model is, and its cache after it was captured once."""
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        _go_to(folder, patch)
        _capture()
    (folder / "cache").rename(folder / "kept")
    return folder


def _go_to(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.chdir(folder)
    patch.setenv("EXTRA_WIDTH", "1230")
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "model.py").write_text(_MODEL)
    (folder / "widths.py").write_text("WIDTH = 3\n")
    (folder / "size.json").write_text("1")
    (folder / "more.txt").unlink(missing_ok=True)


@pytest.fixture
def captured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Capture:
    """Captures a model of 1,234 features, which was captured before."""
    _go_to(folder, monkeypatch)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    shutil.copytree(folder / "kept", folder / "cache")
    return _capture


def _capture(options: TargetOptions = OPTIONS, **more: Any) -> Step:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_CURRENT_TEST", "any")  # a library that is imported copies the environment
        return capture_in_child("model.py:build", options, **more)


def _recall() -> Step | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_CURRENT_TEST", "any")
        return recall("model.py:build", OPTIONS)


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, starting a process is an error."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    return lambda: monkeypatch.setattr(worker, "start", forbidden)


def width(step: Step) -> int:
    return step.parameters["weight"].shape[1]


def test_an_unchanged_target_is_not_captured_again(captured: Capture, no_child: Callable[[], None]) -> None:
    no_child()
    assert width(captured()) == 1234


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


CHANGES = (
    change_the_file,
    change_an_import,
    change_what_it_reads,
    make_what_it_missed,
    set_what_it_asked_for,
)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("captured")
def test_what_the_step_depends_on_is_looked_at(change: Callable[[], None]) -> None:
    assert _recall() is not None
    change()
    assert _recall() is None


def test_a_changed_target_is_captured_again(captured: Capture, no_child: Callable[[], None]) -> None:
    for change in CHANGES:
        change()
    changed = captured()
    assert changed.parameters["weight"].shape == (9, 4 + 2 + 5 + 7)
    no_child()
    assert captured() == changed


def test_other_options_are_another_step(captured: Capture) -> None:
    assert not captured(TargetOptions(optimizer="none", train=False)).settings.training


def test_fresh_captures_again(captured: Capture, no_child: Callable[[], None]) -> None:
    no_child()
    with pytest.raises(AssertionError, match="a process was started"):
        captured(fresh=True)


@pytest.mark.usefixtures("captured")
def test_a_damaged_file_is_not_read(folder: Path) -> None:
    (file,) = (folder / "cache" / "tilefit" / "captures").iterdir()
    for content in ("", "{}\n{}", file.read_text()[:-20], "no JSON\n{}"):
        file.write_text(content)
        assert _recall() is None


def test_a_folder_that_cannot_be_written_costs_time_alone(
    captured: Capture, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "model.py"))
    assert width(captured()) == 1234


def test_tried_changes_are_not_kept(captured: Capture, folder: Path) -> None:
    sources = {str(folder / "widths.py"): "WIDTH = 9\n"}
    before = sorted((folder / "cache").rglob("*"))
    assert width(captured(TargetOptions(optimizer="none", sources=sources))) == 1240
    assert sorted((folder / "cache").rglob("*")) == before


@pytest.mark.usefixtures("captured")
def test_a_variable_is_not_written_down(folder: Path) -> None:
    (file,) = (folder / "cache" / "tilefit" / "captures").iterdir()
    first, _, _ = file.read_text().partition("\n")
    assert "EXTRA_WIDTH" in first
    assert "1230" not in first
