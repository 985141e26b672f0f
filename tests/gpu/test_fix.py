"""On a GPU: ``tilefit fix --measure`` measures the fixes it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilefit.cli import main

SCRIPT = """\
import torch
from torch import nn


def build():
    return nn.Sequential(nn.Linear(4096, 4095), nn.ReLU(), nn.Linear(4095, 4096)), torch.empty(16384, 4096)
"""


@pytest.mark.gpu
def test_measured_fixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    arguments = ["fix", "train.py:build", "--amp", "bf16", "--measure", "--select", "pad-linear"]
    with pytest.raises(SystemExit) as left:
        main([*arguments, "--output-format", "json"])
    assert left.value.code == 1
    plan = json.loads(capfd.readouterr().out)["plan"]
    assert plan["provenance"] == "measured"
    assert plan["speedup"] > 1.5
    assert {fix["name"] for fix in plan["fixes"]} == {"pad-linear"}
    assert plan["fixes"][0]["measured_s"] > 0
