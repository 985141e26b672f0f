"""``tilefit fix``."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from report import browser
from tilefit.capture.child import capture_target
from tilefit.ops import Step
from tilefit.options import TargetOptions
from tilefit.session import fixing

_SCRIPT = """\
import torch
from torch import nn

print("loading")


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up = nn.Linear(2048, hidden)
        self.down = nn.Linear(hidden, 2048)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def build():
    return Net(4095), torch.empty(16384, 2048)


def healthy():
    return Net(4096), torch.empty(16384, 2048)


def make_step():
    net = Net(4096)
    optimizer = torch.optim.AdamW(net.parameters())

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = net(torch.zeros(64, 2048)).square().mean()
        loss.backward()
        optimizer.step()

    return step
"""
_ARGUMENTS = ("--gpu", "h200", "--amp", "bf16", "--fused-optimizer", "--select", "ALN,NTC003", "--no-verify")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A training script; it is captured in this process, which is faster than in a child."""

    def captured(target: str, options: TargetOptions, timeout_s: float, *, fresh: bool = False) -> Step:
        with redirect_stdout(sys.stderr):
            return capture_target(target, options)

    monkeypatch.setattr(fixing, "capture_in_child", captured)
    path = tmp_path / "train.py"
    path.write_text(_SCRIPT)
    return path


def test_it_shows_what_it_would_do_and_changes_nothing(tilefit, script: Path) -> None:
    ran = tilefit("fix", "train.py:build", *_ARGUMENTS)
    assert ran.code == 1
    assert "pad-linear" in ran.out
    assert "times as fast (estimated)" in ran.out
    assert 'model = tilefit.optimize(model, inputs, gpu="h200", amp="bf16"' in ran.out
    assert "train.py:18" in ran.out, "where the model is built"
    assert "unsafe" not in ran.out, "what is done at run time is safe"
    assert script.read_text() == _SCRIPT


def test_a_model_that_is_to_be_compiled_is_compiled_after_its_fixes(tilefit, script: Path) -> None:
    call = json.loads(
        tilefit("fix", "train.py:build", "--compile", *_ARGUMENTS, "--output-format", "json").out
    )["call"]
    first, second = call.splitlines()
    assert "compile=True" in first
    assert second == "model = torch.compile(model)"


_FLAT = """\
import torch
from torch import nn
from torch.nn import functional as F


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(512, 3 * 512)

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))


def build():
    return Flat(), torch.empty(64, 1024, 512)
"""


def test_a_finding_that_its_fix_does_not_reach_is_left_to_the_user(tilefit, script: Path) -> None:
    script.write_text(_FLAT)
    arguments = ("--gpu", "h200", "--amp", "bf16", "--select", "NTC005", "--no-verify")
    checked = tilefit("check", "train.py:build", *arguments[:-1], "--output-format", "json").out
    (finding,) = json.loads(checked)["findings"]
    data = json.loads(tilefit("fix", "train.py:build", *arguments, "--output-format", "json").out)
    (answer,) = data["findings"]
    assert answer["reason"].startswith("contiguous-masks does not reach it")
    assert (answer["code"], answer["level"], answer["gain_s"]) == (
        *("NTC005", finding["safety"]),
        pytest.approx(finding["gain_s"]),
    )
    for more in ((), ("--diff",), ("--output-format", "markdown")):
        ran = tilefit("fix", "train.py:build", *arguments, *more)
        assert "Left to you" in ran.out + ran.err
        assert "contiguous-masks does not reach it" in " ".join((ran.out + ran.err).split())


def test_what_is_only_done_at_run_time_is_told_where_files_are_wanted(tilefit, script: Path) -> None:
    ran = tilefit("fix", "train.py:build", "--gpu", "h200", "--select", "NTC003", "--no-verify", "--diff")
    assert "fuse-optimizer" not in ran.out
    assert "which line makes, calls or trains it is not known" in " ".join(ran.err.split())


def test_a_function_is_told_of_what_is_done_to_models_in_the_order_of_a_check(tilefit, script: Path) -> None:
    arguments = ("train.py:make_step", "--gpu", "h200", "--output-format", "json")
    data = json.loads(tilefit("fix", *arguments).out)
    findings = json.loads(tilefit("check", *arguments).out)["findings"]
    assert [(f["code"], f["safety"], f["gain_s"]) for f in findings] == [
        (a["code"], a["level"], pytest.approx(a["gain_s"])) for a in data["findings"]
    ]
    reasons = {a["code"]: a["reason"] for a in data["findings"]}
    assert "compile does it at run time, to a model" in reasons["NTC001"]


def test_a_healthy_model_has_nothing_to_fix(tilefit, script: Path) -> None:
    ran = tilefit("fix", "train.py:healthy", *_ARGUMENTS)
    assert ran.code == 0
    assert "Nothing to fix." in ran.out


def test_the_predicted_saving_is_that_of_the_plan(tilefit, script: Path) -> None:
    data = json.loads(tilefit("fix", "train.py:build", *_ARGUMENTS, "--output-format", "json").out)
    plan = data["plan"]
    assert plan["speedup"] > 1
    assert sum(fix["gain_s"] for fix in plan["fixes"]) == pytest.approx(plan["before_s"] - plan["after_s"])
    assert plan["verification"] is None


def test_every_fix_is_proven_unless_told_not_to(tilefit, script: Path) -> None:
    ran = tilefit("fix", "train.py:build", *_ARGUMENTS, "--verify", "--output-format", "json")
    plan = json.loads(ran.out)["plan"]
    assert plan["fixes"]
    assert plan["verification"]["ok"]


_OF_STEP = ("train.py:make_step", "--gpu", "h200", "--select", "NTC003")
_FUSED = _SCRIPT.replace("net.parameters())", "net.parameters(), fused=True)")


def test_what_the_script_prints_does_not_mix_with_the_answer(tilefit, script: Path) -> None:
    ran = tilefit("fix", *_OF_STEP, "--output-format", "json")
    data = json.loads(ran.out)
    assert "loading" in ran.err
    assert [(patch["code"], patch["summary"]) for patch in data["patches"]] == [("NTC003", "fused=True")]


def test_a_diff_is_a_patch_for_git(tilefit, script: Path) -> None:
    ran = tilefit("fix", *_OF_STEP, "--diff")
    assert ran.code == 1
    subprocess.run(["git", "apply"], input=ran.out, text=True, check=True)
    assert script.read_text() == _FUSED


def test_write_changes_the_file_once(tilefit, script: Path) -> None:
    first = tilefit("fix", *_OF_STEP, "--write")
    assert first.code == 1
    assert "Written to train.py" in first.out
    assert script.read_text() == _FUSED
    again = tilefit("fix", *_OF_STEP, "--write")
    assert (again.code, "Nothing to fix." in again.out) == (0, True)
    assert script.read_text() == _FUSED


def test_markdown_has_the_table_and_the_patch(tilefit, script: Path) -> None:
    out = tilefit("fix", "train.py:build", *_ARGUMENTS, "--output-format", "markdown").out
    assert "| fix | saves |" in out
    out = tilefit("fix", *_OF_STEP, "--output-format", "markdown").out
    assert "```diff" in out
    assert "+    optimizer = torch.optim.AdamW(net.parameters(), fused=True)" in out


def test_a_page_shows_the_fixes_and_the_patch(tilefit, script: Path, tmp_path: Path) -> None:
    tilefit("fix", "train.py:build", *_ARGUMENTS, "--output-file", "fix.html")
    page = (tmp_path / "fix.html").read_text()
    assert '<td class="text">pad-linear</td>' in page or "<td>pad-linear</td>" in page
    assert "tilefit.optimize(model, inputs" in page
    tilefit("fix", *_OF_STEP, "--output-file", "step.html")
    step = (tmp_path / "step.html").read_text()
    assert "+    optimizer = torch.optim.AdamW(net.parameters(), fused=True)\n" in step
    if executable := browser.find():  # on a telephone nothing of the table lies beside the screen
        with browser.running(executable, tmp_path / "profile") as chromium:
            for name in ("fix.html", "step.html"):
                chromium.open(tmp_path / name, width=390)
                boxes = "[...document.querySelectorAll('.scroll')]"
                assert set(chromium.evaluate(f"{boxes}.map(box => box.scrollWidth - box.clientWidth)")) == {0}


def test_the_text_goes_to_a_file(tilefit, script: Path, tmp_path: Path) -> None:
    ran = tilefit("fix", "train.py:build", *_ARGUMENTS, "--output-file", "plan.txt")
    assert "pad-linear" not in ran.out
    assert "pad-linear" in (tmp_path / "plan.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train.py:build", "--gpu", "h2000"), "unknown GPU 'h2000'"),
        (("train.py:build", "--gpu", "h200", "--levl", "safe"), "No such option: --levl"),
        (("train.py:build", "--gpu", "h200", "--select", "pad-liner"), "Did you mean pad-linear?"),
        (("train.py:build", "--gpu", "h200", "--diff", "--write"), "--diff prints a patch"),
        (("train.py:bild", "--gpu", "h200"), "Did you mean 'build'?"),
        (("broken.py:build", "--gpu", "h200"), "broken.py:1: importing broken.py raised SyntaxError"),
        (("hf:gpt2", "--gpu", "h200", "--diff"), "there is no source of yours to change"),
        (("train.py:build", "--measure"), "no CUDA GPU"),
        (("train.py:build",), "no GPU was named"),
    ],
)
def test_errors_say_what_is_wrong(tilefit, script: Path, arguments: tuple[str, ...], said: str) -> None:
    script.with_name("broken.py").write_text("def build(:\n")
    ran = tilefit("fix", *arguments)
    assert ran.code == 2
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_a_typo_in_the_command_is_recognised(tilefit) -> None:
    assert "Did you mean 'fix'?" in tilefit("fxi", "train.py:build").err


def test_the_project_settles_what_is_fixed(tilefit, script: Path, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.tilefit]\ngpu = "h200"\nignore = ["ALN"]\n')
    ran = tilefit("fix", "train.py:build", "--amp", "bf16", "--fused-optimizer")
    assert "pad-linear" not in ran.out


def test_in_processes_of_its_own(tilefit, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    ran = tilefit("fix", *_OF_STEP, "--write")
    assert ran.code == 1
    assert "loading" not in ran.out
    assert (tmp_path / "train.py").read_text() == _FUSED


def test_what_has_no_price_is_not_said_to_save_nothing(
    tilefit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("""\
import torch

torch.backends.cudnn.deterministic = True
net = torch.nn.Conv2d(3, 64, 3).to("cuda")
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(4):
    net(torch.randn(8, 3, 32, 32, device="cuda")).mean().backward()
    optimizer.step()
""")
    ran = tilefit("fix", "train.py", "--gpu", "h200", "--select", "ANO001", "--diff")
    assert "ANO001  not priced  advice  the whole step: no fix does it" in " ".join(ran.err.split("\n"))
