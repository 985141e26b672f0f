"""Runs the commands and the Python that the README and the guide show, and writes what they print under them.

    PYTHONPATH=src python benchmarks/console_blocks.py [PAGE…]

A block of commands between ``<!-- begin -->`` and ``<!-- end -->`` shows what a machine without a GPU prints:
each line that begins with ``$`` is run, one after the other in a folder with the examples, and what follows
it is replaced. So is a block of text right behind one of Python. The tests run the same and compare.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

#: Runs a command in a folder with some variables of the environment.
Run = Callable[[list[str], Path, dict[str, str]], tuple[int, str, str]]
ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
_BLOCK = re.compile(r"(?<=^<!-- begin -->\n```console\n).*?(?=^```\n<!-- end -->$)", re.MULTILINE | re.DOTALL)

#: Python, and what it prints.
_PYTHON = re.compile(
    r"(^```python\n((?:(?!```).*\n)*)```\n\n```text\n)((?:(?!```).*\n)*)(?=```$)", re.MULTILINE
)


def programs(page: Path) -> list[tuple[str, str]]:
    """The page's Python whose output it shows, and that."""
    return [(code, text) for _, code, text in _PYTHON.findall(page.read_text(encoding="utf-8"))]


def output(code: str) -> str:
    """What Python prints today."""
    with tempfile.TemporaryDirectory() as folder:
        return _printed(["python", "-c", code], Path(folder), in_a_process)


def blocks(page: Path) -> list[str]:
    """What stands in the page's marked blocks."""
    return _BLOCK.findall(page.read_text(encoding="utf-8"))


def rerun(block: str, run: Run | None = None) -> str:
    """The block as its commands fill it today; ``run``: how they are run, each in a process unless given."""
    lines = [line for line in block.splitlines() if line.startswith("$ ")]
    # A comment, as after "make demo    # what it does", is no argument.
    commands = [shlex.split(line[2:], comments=True) for line in lines]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "examples", Path(folder) / "examples")
        (Path(folder) / "benchmarks").symlink_to(ROOT / "benchmarks")
        printed = [_printed(command, Path(folder), run or in_a_process) for command in commands]
    shown = [f"{line}\n{output}" + "\n" * bool(output) for line, output in zip(lines, printed, strict=True)]
    return "".join(shown).rstrip("\n") + "\n"


def _printed(command: list[str], folder: Path, run: Run) -> str:
    # Neither the calibration nor the store of who runs this is used.
    alone = {"COLUMNS": "80", "XDG_DATA_HOME": str(folder), "TILEFIT_STORE": str(folder / "store.sqlite")}
    code, out, error = run(command, folder, alone)
    if code > 1:  # 1 is findings
        raise RuntimeError(f"{shlex.join(command)}:\n{error}")
    return "".join(f"{line.rstrip()}\n" for line in out.strip("\n").splitlines())


def in_a_process(command: list[str], folder: Path, variables: dict[str, str]) -> tuple[int, str, str]:
    """Run a command in a folder; its exit code and what it writes."""
    programs = {"tilefit": [sys.executable, "-m", "tilefit"], "python": [sys.executable]}
    ran = subprocess.run(
        [*programs[command[0]], *command[1:]],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, **variables, "PYTHONPATH": str(ROOT / "src")},
    )
    return ran.returncode, ran.stdout, ran.stderr


def main() -> None:
    for page in map(Path, sys.argv[1:] or PAGES):
        text = page.read_text(encoding="utf-8")
        text = _BLOCK.sub(lambda block: rerun(block.group()), text)
        page.write_text(_PYTHON.sub(lambda shown: shown[1] + output(shown[2]), text), encoding="utf-8")


if __name__ == "__main__":
    main()
