"""A check and a fix say the same of twenty programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tilefit.assessment import Assessment
from tilefit.capture.child import capture_target
from tilefit.cost import fuse
from tilefit.cost.priced import resolve
from tilefit.fixes import all_fixes
from tilefit.options import Selection, TargetOptions
from tilefit.session import fixing
from tilefit.session.fixing import FixRequest, FixSession

_HEAD = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, hidden, act):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width), act
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Written(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x.pow(3))))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 64)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return ((q @ k.mT / 8).softmax(-1) @ v).transpose(1, 2).flatten(2)


def convolutions(*widths):
    pairs = list(zip((3, *widths), widths))
    return nn.Sequential(*(m for a, b in pairs for m in (nn.Conv2d(a, b, 3), nn.BatchNorm2d(b), nn.ReLU())))


def build():
    return {model}, torch.empty({inputs})
"""
#: Model, inputs, options of the step.
_PROGRAMS: list[tuple[str, str, dict[str, object]]] = [
    ("nn.Linear(1024, 4095)", "16384, 1024", {}),
    ("nn.Linear(1024, 4095)", "16384, 1024", {"compile": True}),
    ("Block(1024, 4095, nn.GELU())", "16, 1024, 1024", {}),
    ("Block(1024, 4096, Written())", "16, 1024, 1024", {}),
    ("Block(1024, 4096, nn.GELU())", "16, 1024, 1024", {"amp": "off"}),
    ("Block(256, 1024, nn.GELU())", "2, 64, 256", {}),
    ("nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))", "16, 4096", {}),
    ("nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))", "16, 4096", {"train": False}),
    ("convolutions(64, 128)", "32, 3, 64, 64", {}),
    ("convolutions(63, 127)", "32, 3, 64, 64", {}),
    ("convolutions(64, 128)", "32, 3, 64, 64", {"channels_last": True}),
    ("convolutions(64, 128)", "32, 3, 64, 64", {"amp": "off"}),
    ("Attention(512)", "8, 512, 512", {}),
    ("Attention(512)", "8, 512, 512", {"train": False}),
    ("nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 50257))", "4096, 512", {}),
    ("nn.RNN(256, 256, batch_first=True)", "16, 64, 256", {}),
    ("nn.LSTM(128, 128)", "32, 16, 128", {"train": False}),
    ("nn.TransformerEncoderLayer(500, 10, 2000, batch_first=True)", "30, 333, 500", {}),
    ("nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())", "1048576, 64", {}),
    ("nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.SiLU())", "65536, 64", {"optimizer": "sgd"}),
]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """A program, captured in this process."""
    monkeypatch.chdir(tmp_path)
    captured = lambda target, options, timeout_s, fresh: capture_target(target, options)  # noqa: E731
    monkeypatch.setattr(fixing, "capture_in_child", captured)
    monkeypatch.setattr(fixing, "has_source", lambda target: False)  # nothing is written

    def written(model: str, inputs: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(_HEAD.replace("{model}", model).replace("{inputs}", inputs))
        return f"{path}:build"

    return written


@pytest.mark.parametrize(("model", "inputs", "how"), _PROGRAMS)
def test_a_fix_says_of_each_finding_what_a_check_says(
    model: str, inputs: str, how: dict[str, object], script: Callable[[str, str], str]
) -> None:
    target, (gpu,) = script(model, inputs), resolve("h200")
    options = TargetOptions(**{"amp": "bf16", **how})  # type: ignore[arg-type]
    step = capture_target(target, options)
    checked = Assessment(fuse(step) if options.compile else step, gpu).findings
    session = FixSession(
        FixRequest(target=target, options=options, gpu=gpu, selection=Selection(), verify=False)
    )
    answers, plan = session.answers, session.plan
    assert plan is not None
    # The same findings in the same order, at the same level, with the same saving.
    assert [(f.code, f.safety, f.gain_s) for f in checked] == [(a.code, a.level, a.gain_s) for a in answers]
    savings = [a.gain_s for a in answers if a.level != "throughput"]
    assert savings == sorted(savings, reverse=True)
    assert [a.level for a in answers][: len(savings)].count("throughput") == 0
    levels = {fix.name: fix.level for fix in all_fixes()}
    for finding, answer in zip(checked, answers, strict=True):
        # Somebody answers it, or there is a reason.
        assert bool(answer.fixes or answer.written) != bool(answer.reason)
        assert finding.gain_s < plan.before_s
        for name in set(answer.fixes) & set(levels):
            assert answer.level == levels[name] == "safe"
        # What the changes that answer it save together is not much less than it says to save alone.
        if answer.fixes:
            assert 0.75 * answer.gain_s <= plan.before_s - plan.after_s
