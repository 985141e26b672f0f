"""The command line as a whole: how it starts, and how it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

import tilefit as package
from tilefit.cli import main
from tilefit.cli.main import _keep_to_quota

_REPORT = str(Path(__file__).parent.parent / "report" / "data" / "first-report.json")


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["check", "--help"],
        ["rules"],
        ["rule", "ALN002"],
        ["gpu"],
        ["gpu", "h200"],
        ["gemm", "64", "64", "64", "--gpu", "h200"],
        *([verb, "hf:gpt2", "--gpu", "nope"] for verb in ("check", "fix", "sweep", "curve")),
        ["check", "no_file.py:build", "--gpu", "h200"],
        ["fix", "no_file.py:build", "--gpu", "h200"],
        ["sweep", "no_file.py:build", "--gpu", "h200", "--over", "batch=1,2"],
        ["curve", "no_file.py:build", "--gpu", "h200", "--batch", "1:4"],
        ["profile", "no_file.py:build"],
        ["bench", "no_file.py:build"],
        ["check", "no-colon", "--gpu", "h200"],
        ["report", _REPORT, "--output-format", "html"],
        ["compare", _REPORT, _REPORT],
    ],
)
def test_what_needs_no_model_does_not_import_torch(arguments: list[str]) -> None:
    ran = _python(
        "import sys\n"
        "from tilefit.cli import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        "print('torch' in sys.modules)\n"
    )
    assert ran.stdout.splitlines()[-1] == "False"


def test_importing_the_package_imports_neither_torch_nor_more_than_its_version() -> None:
    ran = _python(
        "import sys, tilefit; print([m for m in sys.modules if m.startswith(('tilefit.', 'torch'))])"
    )
    assert ran.stdout.strip() == "['tilefit.version']"


def test_version(tilefit) -> None:
    ran = tilefit("--version")
    assert (ran.code, ran.out) == (0, f"tilefit {package.__version__}\n")


def test_without_a_verb_the_help_is_shown(tilefit) -> None:
    ran = tilefit()
    assert ran.code == 2
    assert "check" in ran.out
    assert "error" not in ran.err


@pytest.mark.parametrize("verb", ["check", "sweep", "plan", "precision", "profile"])
def test_paragraphs_of_the_help_fill_its_width(tilefit, verb: str) -> None:
    text = tilefit(verb, "--help").out.partition("╭")[0].splitlines()
    lines = [line.strip() for line in text]
    for line, following in pairwise(lines):
        if line and following:
            assert len(line) + 1 + len(following.split()[0]) > 78, line


def test_a_name_of_several_gpus_says_which_it_took(tilefit) -> None:
    told = tilefit("gpu", "h100").out
    assert told.startswith("h100 is taken as the NVIDIA H100 SXM 80GB.")
    assert "--gpu h100-pcie" in told
    assert "is taken as" not in tilefit("gpu", "h100-pcie").out


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["chek"], "Did you mean 'check'?"),
        (["check", "hf:gpt2", "--gpuu", "h200"], "--gpu"),
        (["gpu", "h2000"], "Did you mean h200 or "),
        (["rule", "ALN0002"], "Did you mean ALN002?"),
        (["check", "hf:gpt2", "--gpu", "h200", "--select", "ALM"], "Did you mean ALN?"),
        (["check", "hf:gpt2", "--gpu", "h200", "--amp", "bf6"], "'bf16'"),
        (["gemm", "64", "64", "64", "--gpu", "h200", "--dtype", "bf61"], "bf16"),
        (["gemm", "64", "64"], "tilefit gemm --help"),
        (["gemm", "64", "-5", "64", "--gpu", "h200"], "-5: a size is at least 1"),
        (["gemm", "64", "64", "64", "--gpu", "h200", "--gpu", "l4"], "--gpu is given 2 times"),
        (["fix", "hf:gpt2", "--gpu", "h200", "--gpu", "l4"], "--gpu is given 2 times"),
        (["curve", "gemm", "1:8", "8", "8", "--over", "m", "--over", "n"], "--over is given 2 times"),
        (["rule", "ALN999"], "There are ALN001, ALN002,"),
        (["rule", "aln"], "There are ALN001, ALN002,"),
        (["check", "hf:gpt2", "--gpu", "h200", "--select", " , "], "--select names nothing"),
        (["check", "hf:gpt2", "--gpu", "h200", "--output-file", "x.docx"], "end it in .txt"),
        (
            ["sweep", "hf:gpt2", "--gpu", "h200", "--batch", "1", "--output", "x.md"],
            ".txt or .log or .json or .csv",
        ),
    ],
)
def test_a_typo_is_one_clear_message(tilefit, arguments: list[str], suggestion: str) -> None:
    ran = tilefit(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert suggestion in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("tilefit che", "check"),
        ("tilefit check net.py:build --gpu titan-r", "titan-rtx"),
        ("tilefit rule ALN002", "ALN002"),
        ("tilefit rule aln002", "aln002"),
        ("tilefit check net.py:build --gpu nope", ""),
    ],
)
def test_the_shell_completes(typed: str, completed: str) -> None:
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    ran = subprocess.run(
        [sys.executable, "-c", "from tilefit.cli import main; main()"],
        env={**os.environ, **asked, "_TILEFIT_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.split() == completed.split()


def test_without_a_gpu_one_must_be_named(tilefit) -> None:
    ran = tilefit("gemm", "64", "64", "64")
    assert ran.code == 2
    assert "--gpu h200" in ran.err


def _failing(error: BaseException):
    def names() -> tuple[str, ...]:
        raise error

    return names


def test_an_interrupt_ends_quietly(tilefit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilefit.gpus.names", _failing(KeyboardInterrupt()))
    ran = tilefit("gpu")
    assert (ran.code, ran.err) == (130, "")


def test_an_interrupt_while_it_ends_is_as_quiet() -> None:
    ran = _python(
        "import atexit, os, signal\n"
        "from tilefit import gpus\n"
        "from tilefit.cli.main import main\n"
        "def names():\n"
        "    raise KeyboardInterrupt\n"
        "gpus.names = names\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "main(['gpu'])\n"
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (-signal.SIGINT, "", "")


def test_an_interrupt_while_a_model_is_captured_ends_quietly(tmp_path: Path) -> None:
    started = tmp_path / "started"
    model = tmp_path / "slow.py"
    model.write_text(
        "import pathlib, time\n"
        "def build():\n"
        f"    pathlib.Path({str(started)!r}).touch()\n"
        "    time.sleep(60)\n"
    )
    # A group of its own: a terminal sends the interrupt to every process in it.
    process = subprocess.Popen(
        [sys.executable, "-m", "tilefit", "check", f"{model}:build", "--gpu", "h200"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while process.poll() is None and not started.exists():
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert all(line.endswith("…") for line in err.splitlines())  # progress, on a slow machine


def test_a_bug_says_so_and_how_to_see_more(tilefit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilefit.gpus.names", _failing(ValueError("unforeseen")))
    ran = tilefit("gpu")
    assert ran.code == 2
    assert "ValueError: unforeseen" in ran.err
    assert "TILEFIT_DEBUG=1" in ran.err
    assert "Traceback" not in ran.err


def test_a_bug_can_be_debugged(tilefit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilefit.gpus.names", _failing(ValueError("unforeseen")))
    monkeypatch.setenv("TILEFIT_DEBUG", "1")
    with pytest.raises(ValueError, match="unforeseen"):
        main(["gpu"])


def test_a_reader_that_stops_reading_is_no_error() -> None:
    command = f"{sys.executable} -m tilefit gpu | true"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert ran.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_no_bug() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "tilefit", "rules"]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (2, "error: no space is left to write to\n")


def test_a_terminal_without_unicode_gets_what_is_like_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tilefit", "gemm", "4096", "50257", "64", "--gpu", "h200"],
        capture_output=True,
        check=False,
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)},
    )
    assert ran.returncode == 0
    assert b" us" in ran.stdout  # µs
    assert b"?" not in ran.stdout


@pytest.mark.parametrize(
    ("quota", "threads"), [("150000 100000", "1"), ("400000 100000", "4"), ("max 100000", None)]
)
def test_linear_algebra_keeps_to_a_containers_quota(
    quota: str, threads: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    _keep_to_quota(str(tmp_path / "cpu.max"))
    assert os.environ.get("OPENBLAS_NUM_THREADS") == threads
