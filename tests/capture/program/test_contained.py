"""Programs that do what a well-behaved one does not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tilefit.capture.child import capture_program_in_child
from tilefit.errors import TilefitError
from tilefit.ops import Step
from tilefit.options import ProgramOptions

TRAIN = """
import os, sys, threading
import torch
net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    net(torch.randn(32, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


def _run(folder: Path, code: str, **options: object) -> Step:
    path = folder / "program.py"
    path.write_text(TRAIN + code)
    told = ProgramOptions(program=str(path), **options)  # type: ignore[arg-type]
    return capture_program_in_child(told, "h200", timeout_s=60)


def _line(text: str, code: str) -> str:
    return f"program.py:{(TRAIN + code).splitlines().index(text) + 1}"


def test_one_that_catches_everything_and_never_ends_is_left(tmp_path: Path) -> None:
    code = (
        "open('losses.csv', 'w').write('')\n"
        "while True:\n    try:\n        step()\n    except:\n        pass\n    finally:\n"
        "        print('x' * 1000)\n"
    )
    (tmp_path / "losses.csv").write_text("kept")
    assert _run(tmp_path, f"os.chdir({str(tmp_path)!r})\n" + code).ops
    assert (tmp_path / "losses.csv").read_text() == "kept"


def test_what_it_writes_in_python_is_imported(tmp_path: Path) -> None:
    """As datasets, evaluate and transformers do with code that comes with data and models."""
    (tmp_path / "cache").mkdir()
    code = (
        f"import importlib\nsys.path.append({str(tmp_path / 'cache')!r})\n"
        f"os.makedirs({str(tmp_path / 'cache/modules/sub')!r})\n"
        "for name in ('__init__', 'sub/__init__', 'sub/twice'):\n"
        f"    with open(os.path.join({str(tmp_path / 'cache/modules')!r}, name + '.py'), 'w') as file:\n"
        "        file.write('def twice(x): return 2 * x')\n"
        "importlib.invalidate_caches()\n"
        "assert importlib.import_module('modules.sub.twice').twice(4) == 8\n"
        "for _ in range(9): step()\n"
    )
    assert _run(tmp_path, code).ops
    assert not (tmp_path / "cache" / "modules").exists()


def test_one_of_few_steps_is_told_which_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(TilefitError, match="ended after 2 of the 3") as caught:
        _run(tmp_path, "step()\nstep()\n")
    assert "--skip 1" in caught.value.hint


@pytest.mark.parametrize(
    ("code", "looks_after_s"),  # once both processes are through, and between them
    [
        ("if os.fork() == 0:\n    for _ in range(9): step()\nelse:\n    os.wait()\n", 2.0),
        ("if os.fork() == 0:\n    raise RuntimeError\nos.wait()\nfor _ in range(9): step()\n", 0.02),
    ],
    ids=["in_it", "without_it"],
)
def test_one_that_trains_in_a_process_of_its_own(
    tmp_path: Path, code: str, looks_after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilefit.capture.worker._POLL_S", looks_after_s)
    assert _run(tmp_path, code).ops


@pytest.mark.parametrize(
    ("code", "what", "where"),
    [
        ("step()\nsys.exit(0)\n", "ended after 1 of the 3 optimizer steps", "program.py"),
        ("answer = input('go on? ')\n", "reads from standard input", "answer = input('go on? ')"),
        (
            "import sys\nrows = sys.stdin.readlines()\n",
            "reads from standard input",
            "rows = sys.stdin.readlines()",
        ),
        ("sys.exit(2)\n", "left with exit code 2\n  Its own arguments", "program.py"),
        ("assert 1 > 2\n", "AssertionError: assert 1 > 2", "assert 1 > 2"),
        (
            "import pandas\npandas.read_csv('no/prices.csv')\n",
            "no/prices.csv is not there",
            "pandas.read_csv('no/prices.csv')",
        ),
        (
            "try:\n    import socket; socket.create_connection(('data.example', 80))\nexcept OSError as e:\n"
            "    raise RuntimeError('no data') from e\n",
            "RuntimeError: no data",
            "    raise RuntimeError('no data') from e",
        ),
        (
            "import http.client\nhttp.client.HTTPConnection('data.example').request('GET', '/')\n",
            ": what the program fetches from data.example is not there",
            "http.client.HTTPConnection('data.example').request('GET', '/')",
        ),
    ],
)
def test_one_without_its_steps_is_told_why(tmp_path: Path, code: str, what: str, where: str) -> None:
    with pytest.raises(TilefitError, match=what) as caught:
        _run(tmp_path, code)
    assert caught.value.where.endswith(_line(where, code) if where != "program.py" else where)
    assert caught.value.hint


def test_of_one_that_raises_its_own_frames_are_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TilefitError, match="ValueError: mine"):
        _run(tmp_path, "def check():\n    raise ValueError('mine')\ncheck()\n")
    frames = [line for line in capfd.readouterr().err.splitlines() if line.startswith("  File ")]
    assert [frame.rsplit(", in ")[1] for frame in frames] == ["<module>", "check"]


def test_files_that_libraries_write_themselves_are_not_the_users(tmp_path: Path) -> None:
    code = (
        f"import sqlite3; from safetensors.torch import load_file, save_file; os.chdir({str(tmp_path)!r})\n"
        "os.mkdir('made')\n"
        "for _ in range(9):\n"
        "    save_file({'w': torch.ones(3)}, 'model.safetensors')\n"
        "    save_file({'w': torch.ones(3)}, 'made/model.safetensors')\n"
        "    assert load_file('made/model.safetensors').keys() == load_file('model.safetensors').keys()\n"
        "    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), 'model.ts')\n"
        "    torch.jit.load(f='model.ts')\n"
        "    sqlite3.connect('runs.db').execute('create table if not exists t (a int)')\n"
        "    sqlite3.connect(':memory:'), torch.cuda.random.get_rng_state()\n"
        "    step()\n"
    )
    for name in ("model.safetensors", "model.ts"):
        (tmp_path / name).write_text("kept")
    assert _run(tmp_path, code).ops
    assert (tmp_path / "model.safetensors").read_text() == (tmp_path / "model.ts").read_text() == "kept"
    assert {each.name for each in tmp_path.iterdir()} == {"model.safetensors", "model.ts", "program.py"}


def test_what_arrow_maps_is_what_the_program_wrote(tmp_path: Path) -> None:
    """As ``datasets`` does with what it has made of local files."""
    pytest.importorskip("pyarrow")
    code = (
        f"import pyarrow; os.chdir({str(tmp_path)!r})\n"
        "open('rows.arrow', 'wb').write(b'rows')\n"
        "for _ in range(9):\n"
        "    assert pyarrow.memory_map('rows.arrow').read() == b'rows'\n"
        "    assert pyarrow.memory_map('mine.arrow').read() == b'mine'\n"
        "    step()\n"
    )
    (tmp_path / "mine.arrow").write_text("mine")
    assert _run(tmp_path, code).ops
    assert {each.name for each in tmp_path.iterdir()} == {"mine.arrow", "program.py"}


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock is Linux's")
def test_what_nobody_redirects_cannot_be_written(tmp_path: Path) -> None:
    """Run in a process of its own, which is confined from then on."""
    (tmp_path / "may").mkdir()
    (tmp_path / "mine.bin").write_text("kept")
    code = (
        "import ctypes, os, sys; from tilefit.capture.program.confined import confine\n"
        "if not confine(['may', 'gone', '/dev']): sys.exit(77)\n"
        "opened = ctypes.CDLL(None).open\n"
        "print([opened(path, os.O_WRONLY | os.O_CREAT | flag, 0o600) >= 0 for path, flag in [\n"
        "    (b'mine.bin', os.O_TRUNC), (b'new.bin', 0), (b'may/new.bin', 0), (b'/dev/null', 0)]])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    if run.returncode == 77:
        pytest.skip("this system has no Landlock")
    assert run.stdout.split("\n")[0] == "[False, False, True, True]", run.stderr
    assert (tmp_path / "mine.bin").read_text() == "kept"


def test_what_libraries_have_cached_among_temporary_files_is_found(tmp_path: Path) -> None:
    kept = tmp_path / "words.bpe"
    kept.write_text("mine")
    code = f"""
import tempfile
cached = os.path.join(tempfile.gettempdir(), {os.path.relpath(kept, tempfile.gettempdir())!r})
assert cached != {str(kept)!r} and open(cached).read() == "mine"
os.makedirs(os.path.dirname(cached), exist_ok=True)
open(cached, "w").write("changed")
assert open(cached).read() == "changed"
for _ in range(9): step()
"""
    assert _run(tmp_path, code).ops
    assert kept.read_text() == "mine"


def test_a_folder_that_a_library_makes_in_c_is_made_elsewhere(tmp_path: Path) -> None:
    """As LMDB's: one that is there is read, where it is."""
    (tmp_path / "lmdb.py").write_text("def open(path, **options):\n    return path\n")
    (tmp_path / "there").mkdir()
    code = f"""
import lmdb
os.chdir({str(tmp_path)!r})
assert not lmdb.open("cache").startswith({str(tmp_path)!r}) and lmdb.open("cache") != "cache"
assert lmdb.open("there", readonly=True) == "there"
for _ in range(4):
    step()
"""
    assert _run(tmp_path, code).ops
