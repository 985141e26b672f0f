"""The user's line that made a module, where the line that runs is a library's."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from tilefit.assessment import Assessment
from tilefit.capture.child import capture_in_child, capture_target
from tilefit.capture.sites import noting_makers
from tilefit.cost.priced import resolve
from tilefit.ops import Step
from tilefit.ops.step import maker
from tilefit.options import TargetOptions
from tilefit.report import render

_MODEL = """\
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=256, n_head=4, vocab_size=50257))
        self.own = nn.Linear(50257, 64)

    def forward(self, ids):
        return self.own(self.inner(input_ids=ids).logits)

def build():
    return Two(), (torch.zeros(8, 512, dtype=torch.int64),)
"""


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Step:
    folder = tmp_path_factory.mktemp("code")
    (folder / "own_code.py").write_text(_MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return capture_target("own_code.py:build", TargetOptions(amp="bf16"))


def test_a_module_knows_the_line_and_what_is_in_it_shares_it(step: Step) -> None:
    assert step.made == {"": "own_code.py:15", "inner": "own_code.py:8", "own": "own_code.py:9"}
    assert step.libraries == ("transformers",)
    assert Step.from_json(step.to_json()) == step
    assert step.origin("inner.transformer.h.*.mlp", "transformers/activations.py:66") == "own_code.py:8"
    assert step.origin("own", "own_code.py:12") == ""  # the user's own line says more
    assert step.origin("", "") == "own_code.py:15"
    assert maker({}, "a.b") == ""


def test_annotations_stand_at_the_users_line(step: Step) -> None:
    report = Assessment(step, resolve("h200")[0]).report
    (found,) = (each for each in report.findings if each.code == "ALN002")
    assert found.source.startswith("transformers/models/gpt2/modeling_gpt2.py:")
    assert found.origin == "own_code.py:8"
    annotations = render(report, "github")
    assert "file=own_code.py,line=8,title=ALN002" in annotations
    assert f"in {found.source}, made in this line" in annotations
    assert "file=transformers" not in annotations
    assert "own_code.py:8: ALN002" in render(report, "concise")
    assert '"uri": "transformers' not in render(report, "sarif")


_FUNCTION = """\
import torch
from torch import nn

class Own(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)

def build(device=None):
    first, second = nn.Linear(64, 64, device=device), nn.Linear(64, 64, device=device)
    optimizers = [Own(first.parameters()), torch.optim.Adam(second.parameters())]
    idle = torch.optim.Adam(second.parameters())

    def step():
        x = torch.zeros(64, 64, device=device)
        second(first(x)).sum().backward()
        for each in optimizers:
            each.step()

    return step
"""


@pytest.mark.parametrize("device", ["None", "'cuda'"])
def test_a_function_has_the_lines_of_its_optimizers_and_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("function.py").write_text(_FUNCTION.replace("None", device))
    step = capture_in_child("function.py:build", TargetOptions(), fresh=True)
    assert step.program.optimizers == ("function.py:10",) * 2
    assert {(each.call, each.name) for each in step.program.models} == {
        ("function.py:15:23", "first"),
        ("function.py:15:24", "second"),
    }
    assert step.program.calls_models
    assert Step.from_json(step.to_json()) == step
    assert bool(step.program) == (device != "None")  # on shapes nothing of it is to be priced or told


def test_classes_are_left_as_they_were() -> None:
    before = nn.Module.__init__
    with noting_makers():
        assert vars(nn.Linear(2, 2))["_tilefit_made"].startswith("tests/capture/test_makers.py:")
    assert nn.Module.__init__ is before
    assert "_tilefit_made" not in vars(nn.Linear(2, 2))
