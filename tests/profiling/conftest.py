"""Profiled steps on a pretended GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pretend_gpu import pretend_file
from profiled_net import Net, training_step
from tilefit.profiling import session


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every profiled operation seems to have run a kernel on an H200."""
    read = session.read_trace

    def read_pretended(path: Path) -> object:
        path.write_text(json.dumps(pretend_file(path)))
        return read(path)

    monkeypatch.setattr(session, "read_trace", read_pretended)


@pytest.fixture(scope="session")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of two training steps of :class:`Net`, as a user would have recorded it on an H200."""
    from tilefit.profiling.ranges import ModuleRanges

    folder = tmp_path_factory.mktemp("trace")
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    training_step(model, optimizer)
    with ModuleRanges().marking(), torch.profiler.profile(record_shapes=True) as profiler:
        for number in range(2):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                training_step(model, optimizer)
    profiler.export_chrome_trace(str(folder / "cpu.json"))
    path = folder / "trace.json"
    path.write_text(json.dumps(pretend_file(folder / "cpu.json")))
    return path
