"""What is released: a wheel that works by itself, away from the sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tilefit.version import __version__

ROOT = Path(__file__).resolve().parents[1]
#: A package index asks for less than 100 MB; users on slow lines for much less.
LARGEST_BYTES = 4_000_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (found,) = folder.iterdir()
    return found


def test_it_is_small_and_holds_the_package_alone(wheel: Path) -> None:
    assert wheel.name == f"tilefit-{__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < LARGEST_BYTES
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    assert {name.split("/")[0] for name in names} == {"tilefit", f"tilefit-{__version__}.dist-info"}
    sources = (path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*") if path.is_file())
    assert {str(path) for path in sources if "__pycache__" not in path.parts} <= names


def test_the_sources_build_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    def build(kind: str, source: Path, to: str) -> Path:
        command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(tmp_path / to)]
        subprocess.run(command, cwd=source, check=True, capture_output=True)
        (found,) = (tmp_path / to).iterdir()
        return found

    sdist = build("sdist", ROOT, "sdist")
    assert sdist.stat().st_size < LARGEST_BYTES
    with tarfile.open(sdist) as opened:
        opened.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    for name in (
        "docs/index.md",
        "mkdocs.yml",
        "Makefile",
        "constraints.txt",
        "examples/train.py",
    ):
        assert (unpacked / name).is_file(), name
    assert build("wheel", unpacked, "again").read_bytes() == wheel.read_bytes()


def test_it_works_without_the_sources(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "site")
    (tmp_path / "net.py").write_text(
        "from torch import nn, randn\ndef build():\n    return nn.Linear(4096, 4095), randn(8192, 4096)\n"
    )
    code = (
        "import sys, tilefit\n"
        f"assert tilefit.__file__.startswith({str(tmp_path)!r}), tilefit.__file__\n"
        "from tilefit.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    ran = subprocess.run(
        [
            *(sys.executable, "-c", code, "check", "net.py:build", "--gpu", "h200", "--amp", "bf16"),
            *("--output-file", "net.html"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    page = (tmp_path / "net.html").read_text(encoding="utf-8")
    assert "ALN001" in page
    assert "measured by tilefit" in page


def test_the_recipe_of_the_image_has_no_fault() -> None:
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("hadolint is not installed: there is none for this machine")
    read = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (read.returncode, read.stdout) == (0, "")
