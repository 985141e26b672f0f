"""The programs in ``examples/`` and the code in the documentation run as they are."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tilefit.cli import main
from tilefit.cli.config import parse
from tilefit.errors import TilefitError

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import console_blocks

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def _blocks(language: str) -> list[tuple[str, str]]:
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [
        (f"{page.name}-{index}", code)
        for page in PAGES
        for index, code in enumerate(pattern.findall(page.read_text(encoding="utf-8")), 1)
    ]


def _name(value: str) -> str:
    """The block's name, not its code, in the test's."""
    return value if "\n" not in value else ""


def _run(*arguments: str) -> str:
    ran = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_padding_the_vocabulary_makes_the_step_faster() -> None:
    out = _run("examples/pad_the_vocabulary.py")
    assert "ALN002" in out
    before, after = (float(time) for time in re.findall(r": ([\d.]+) ms a step", out))
    assert after < before


def test_the_batch_curve_rises_to_a_knee() -> None:
    out = _run("examples/batch_curve.py")
    rates = [float(line.split()[1]) for line in out.splitlines()[2:]]
    assert rates == sorted(rates)
    assert "memory" in out
    assert "math" in out


def test_a_mistake_in_training_is_found_and_its_mending_too() -> None:
    wrong, right = _run("examples/watch_training.py").split("8 steps watched")[1:]
    assert "AMP001" in wrong
    assert "Nothing wrong." in right


def test_a_rollout_of_many_episodes_is_one_call() -> None:
    out = _run("examples/recurrent_policy.py")
    assert float(re.findall(r"largest difference ([\d.e+-]+)", out)[0]) < 1e-5
    assert "reference: the tensors are not on a CUDA device" in out


@pytest.mark.parametrize(("name", "code"), _blocks("python"), ids=_name)
def test_python_in_the_documentation_runs(
    name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    lacks_gpu = "tilefit.profile(" in code and not torch.cuda.is_available()
    refused = pytest.raises(TilefitError, match="nothing in this trace ran on a GPU")
    with refused if lacks_gpu else nullcontext():
        exec(compile(code, name, "exec"), {})


@pytest.mark.parametrize(
    ("code", "text"), [shown for page in PAGES for shown in console_blocks.programs(page)], ids=_name
)
def test_python_in_the_documentation_prints_what_stands_there(code: str, text: str) -> None:
    _require_its_torch()
    rounding = re.compile(r"\d\.\de-\d\d")  # which CPUs do in orders of their own
    printed = rounding.sub("…", console_blocks.output(code))
    assert printed == rounding.sub("…", text), "run benchmarks/console_blocks.py"


@pytest.mark.parametrize(("name", "text"), _blocks("toml"), ids=_name)
def test_configuration_in_the_documentation_is_understood(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(text, encoding="utf-8")
    assert parse(path).gpu


def _require_its_torch() -> None:
    if f"torch=={torch.__version__.partition('+')[0]}\n" not in (ROOT / "constraints.txt").read_text():
        pytest.skip("written with the version of torch in constraints.txt; others run other kernels")


def _console_blocks() -> list[tuple[str, str]]:
    return [
        (f"{page.name}-{index}", block)
        for page in console_blocks.PAGES
        for index, block in enumerate(console_blocks.blocks(page), 1)
    ]


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str]) -> console_blocks.Run:
    """Runs ``tilefit`` in this process, except what is lent a GPU, which is never taken back."""

    def run(command: list[str], folder: Path, variables: dict[str, str]) -> tuple[int, str, str]:
        if command[0] != "tilefit" or "examples/clipping_on_a_gpu.py" in command:
            return console_blocks.in_a_process(command, folder, variables)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            for variable, value in variables.items():
                patch.setenv(variable, value)
            with pytest.raises(SystemExit) as left:
                main(command[1:])
        assert isinstance(left.value.code, int)
        return left.value.code, *capfd.readouterr()

    return run


@pytest.mark.parametrize(("name", "block"), _console_blocks(), ids=_name)
def test_commands_in_the_documentation_print_what_stands_there(
    name: str, block: str, here: console_blocks.Run
) -> None:
    _require_its_torch()
    if "hf:" in block:
        pytest.importorskip("transformers")
    whole_way = name.startswith("README")
    assert console_blocks.rerun(block, None if whole_way else here) == block, (
        f"{name}: run benchmarks/console_blocks.py"
    )


def test_output_in_the_documentation_is_generated() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for marked, block in re.findall(r"(<!-- begin -->\n)?```console\n(.*?)^```$", text, re.M | re.S):
            printed = [line for line in block.splitlines() if line and not line.startswith(("$", "#", " "))]
            assert marked or not printed, f"{page.name}: {block}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / "decisions").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
