"""``tilefit explain`` and ``tilefit tour``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tilefit as api
from cli.conftest import Run


def test_of_a_saved_report(tilefit: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    linear, rows = nn.Linear(512, 3001), torch.empty(8192, 512, device="meta")
    api.check(linear, rows, gpu=["h200", "l4"], amp="bf16").save(path)
    assert "Name one GPU of it: h200, l4" in tilefit("explain", str(path)).err
    ran = tilefit("explain", str(path), "gemm", "--gpu", "l4")
    assert ran.code == 0
    assert "on NVIDIA L4" in ran.out
    assert "2 · 8192 · 3001 · 512" in ran.out
    refused = tilefit("explain", str(path), "--gpu", "l4", "--batch", "3")
    assert (refused.code, "--batch" in refused.err) == (2, True)


@pytest.mark.parametrize("target", ["nothing.json", "nothing.py:f", "nothing"])
def test_of_nothing(tilefit: Run, target: str) -> None:
    ran = tilefit("explain", target, "--gpu", "h200")
    assert ran.code == 2
    assert "Traceback" not in ran.err
    assert target.removesuffix(":f") in ran.err


def test_a_tour(tilefit: Run) -> None:
    ran = tilefit("tour")
    assert ran.code == 0, ran.err
    for shown in (
        "1 of 4",
        "ALN002",
        "2 · 8192 · 50257 · 512",
        "gemm 8192x3001x512",
        "proven",
        "Now your own",
    ):
        assert shown in ran.out


def test_a_tour_ends_where_one_of_its_commands_was_interrupted(
    tilefit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one would begin, with a library that was half imported."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tilefit.capture.child.capture_in_child", interrupted)
    ran = tilefit("tour")
    assert ran.code == 130
    assert "2 of 4" not in ran.out
