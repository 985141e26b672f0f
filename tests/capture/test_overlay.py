"""Source files are imported as they would be after a change."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from tilefit.capture.overlay import overlaid
from tilefit.capture.packages import is_installed
from tilefit.capture.sites import short_path


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that imports another."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "overlay_sizes.py").write_text("SIZE = 1\n")
    (tmp_path / "overlay_main.py").write_text("from overlay_sizes import SIZE\n")
    return tmp_path


def _size() -> int:
    return int(importlib.import_module("overlay_main").SIZE)


def test_a_changed_file_is_read_by_whoever_imports_it(program: Path) -> None:
    with overlaid({str(program / "overlay_sizes.py"): "SIZE = 2\n"}):
        assert _size() == 2
    with overlaid({str(program / "overlay_sizes.py"): "SIZE = 3\n"}):
        assert _size() == 3
    with overlaid({}):
        assert _size() == 1
    assert (program / "overlay_sizes.py").read_text() == "SIZE = 1\n"


def test_no_bytecode_of_a_change_stays(program: Path) -> None:
    with overlaid({str(program / "overlay_sizes.py"): "SIZE = 2\n"}):
        assert _size() == 2
    for name in ("overlay_main", "overlay_sizes"):
        assert name not in sys.modules
    with overlaid({}):
        assert _size() == 1


def test_modules_that_were_there_before_stay(program: Path) -> None:
    with overlaid({}):
        before = importlib.import_module("overlay_sizes")
        with overlaid({str(program / "overlay_main.py"): "SIZE = 5\n"}):
            assert _size() == 5
        assert sys.modules["overlay_sizes"] is before


@pytest.mark.parametrize("module", ["torch", "json", "tilefit", "pytest"])
def test_libraries_are_installed(module: str) -> None:
    assert is_installed(str(importlib.import_module(module).__file__))


@pytest.mark.parametrize(
    "path", ["<frozen importlib>", "", "/home/me/.venv/lib/python3.12/site-packages/a/b.py"]
)
def test_what_is_no_file_of_the_users(path: str) -> None:
    assert is_installed(path)


def test_a_script_is_the_users(program: Path) -> None:
    assert not is_installed(str(program / "overlay_main.py"))


def test_what_pip_put_beside_a_program_is_installed(program: Path) -> None:
    (program / "wheel-1.0.dist-info").mkdir()
    (program / "wheel-1.0.dist-info" / "RECORD").write_text("overlay_lib/net.py,sha256=0,9\n../bin/run,,\n")
    path = str(program / "overlay_lib" / "net.py")
    assert is_installed(path)
    assert short_path(path) == f"overlay_lib{os.sep}net.py"
    assert not is_installed(str(program / "overlay_main.py"))
