"""The plugin of pytest, as a project uses it.

All cases are tests of one file, which another process runs: to import torch takes seconds.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

_PROJECT = """
import unittest

import pytest
import torch

waste = pytest.mark.tilefit(gpu="a100-80gb", max_waste="5%", amp="bf16", rules=["ALN", "QNT"])


def build(features):
    return torch.nn.Linear(4096, features, device="meta"), torch.empty(8192, 4096, device="meta")


@pytest.fixture
def good():
    return build(4096)


@waste
def test_a_size_that_nobody_meant():
    return build(4095)


@waste
def test_a_good_size():
    return build(4096)


@waste
def test_from_a_fixture(good):
    return good


@waste
@pytest.mark.parametrize("features", [4096, 4095])
def test_for_each_parameter(features):
    return build(features)


@waste
class TestAll:
    def test_a_method(self):
        return build(4096)


@pytest.mark.tilefit(gpu=["t4", "a100-80gb"], max_waste=0.3, amp="bf16", rules=["ALN"], name="both")
def test_every_gpu():
    return build(4095)


@pytest.mark.tilefit(gpu="a100-80gb", rules=["ALN"])
def test_a_training_step():
    model, x = build(4095)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).sum()
        loss.backward()
        optimizer.step()

    return step


@waste
def test_an_assertion_of_its_own():
    assert 1 + 1 == 3
    return build(4095)


def test_without_the_mark():
    assert build(4095)


@waste
def test_that_returns_nothing():
    pass


@waste
def test_that_returns_a_number():
    return 3


@waste
async def test_that_is_async():
    return build(4095)


@pytest.mark.tilefit(gpu="a101")
def test_unknown_gpu():
    return build(8)


@pytest.mark.tilefit(gpu="t4", max_waste="lots")
def test_no_share():
    return build(8)


@pytest.mark.tilefit(gpu="t4", max_wast="5%")
def test_no_argument():
    return build(8)


@pytest.mark.tilefit("t4")
def test_no_name():
    return build(8)


@pytest.mark.tilefit(gpu="t4", rules=["NO"])
def test_no_rule():
    return build(8)


@pytest.mark.tilefit(gpu="t4")
def test_no_inputs():
    return build(8)[0]


@waste
class TestCase(unittest.TestCase):
    def test_a_method_of_a_test_case(self):
        pass
"""


class Outcome(NamedTuple):
    """How a test of the project ended, and what it said."""

    status: str
    text: str


def _pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Of every test of the project, by name; a warning would be an error."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_project.py").write_text(_PROJECT)
    ran = _pytest(folder, "--strict-markers", "-W", "error::pytest.PytestWarning", "--junitxml", "out.xml")
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED, ran.stdout + ran.stderr
    found = {}
    for case in ElementTree.parse(folder / "out.xml").iter("testcase"):
        bad = next((element for element in case if element.tag in ("failure", "error")), None)
        found[case.attrib["name"]] = Outcome(
            "passed" if bad is None else "failed", (bad is not None and bad.text) or ""
        )
    return found


def test_a_size_that_nobody_meant_fails_with_the_findings_and_nothing_else(outcomes) -> None:
    status, text = outcomes["test_a_size_that_nobody_meant"]
    assert status == "failed"
    verdict, finding, fix, more = text.splitlines()
    assert verdict.startswith(
        "test_a_size_that_nobody_meant · training step on NVIDIA A100 SXM 80GB: safe changes would save "
    )
    assert "ALN001 4095 features are no multiple of 8" in finding
    assert "4095 -> 4096" in fix
    assert more == "  tilefit rule ALN001 explains the first."


@pytest.mark.parametrize(
    "name",
    [
        "test_a_good_size",
        "test_from_a_fixture",
        "test_for_each_parameter[4096]",
        "test_a_method",
        "test_without_the_mark",
    ],
)
def test_what_wastes_nothing_or_is_not_marked_passes(outcomes, name: str) -> None:
    assert outcomes[name] == ("passed", "")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("test_for_each_parameter[4095]", "ALN001"),
        ("test_a_training_step", "ALN001"),
        ("test_every_gpu", "both · training step on NVIDIA A100 SXM 80GB"),
        ("test_an_assertion_of_its_own", "assert (1 + 1) == 3"),
    ],
)
def test_what_wastes_or_fails_by_itself_fails(outcomes, name: str, said: str) -> None:
    assert outcomes[name].status == "failed"
    assert said in outcomes[name].text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("test_that_returns_nothing", "this one returned nothing"),
        ("test_that_returns_a_number", "this one returned a value of type int"),
        ("test_that_is_async", "this one returned a value of type coroutine"),
        ("test_unknown_gpu", "unknown GPU 'a101'"),
        ("test_no_share", "max_waste is 'lots'"),
        ("test_no_argument", "the mark tilefit takes no max_wast; it takes, by name: gpu, max_waste, rules,"),
        ("test_no_name", "the mark tilefit takes no t4; it takes, by name: gpu, max_waste, rules,"),
        ("test_no_rule", "no rule is called 'NO'"),
        ("test_no_inputs", "missing 1 required positional argument"),
        ("test_a_method_of_a_test_case", "call tilefit.testing.assert_no_waste in it"),
    ],
)
def test_a_mistake_in_the_test_is_one_message(outcomes, name: str, message: str) -> None:
    status, text = outcomes[name]
    assert status == "failed"
    assert message in text
    assert "Traceback" not in text
    assert "another exception" not in text


def test_the_mark_is_listed(tmp_path: Path) -> None:
    assert "@pytest.mark.tilefit(gpu, max_waste='5%', " in _pytest(tmp_path, "--markers").stdout


def test_the_plugin_does_not_import_torch_and_can_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\ndef test_it():\n    assert 'torch' not in sys.modules\n"
    )
    assert _pytest(tmp_path).returncode == 0
    assert "tilefit" not in _pytest(tmp_path, "-p", "no:tilefit", "--markers").stdout
