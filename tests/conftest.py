"""What every test shares."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import forking
from tilefit.capture import worker

# The processes that tests start find the package where the tests do, whatever folder they run in.
_SOURCE = str(Path(__file__).parent.parent / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_SOURCE, os.environ.get("PYTHONPATH", "")]))
# Nor do they find the profiles of whoever runs them.
_DATA = tempfile.TemporaryDirectory(prefix="tilefit-")
os.environ["XDG_DATA_HOME"] = _DATA.name
# As many processes test as there are cores: more threads would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A job in the background ignores interrupts from its start, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Captures and kernels of whoever runs the tests are not found; the processes of a run share theirs."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["XDG_CACHE_HOME"] = str(shared / "cache")


@pytest.fixture(scope="session", autouse=True)
def _forked_workers() -> Iterator[None]:
    """Workers that import nothing again, where processes can be adopted."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setattr(worker, "start", forking.start)
        yield


@pytest.fixture
def started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are started as users' are."""
    monkeypatch.setattr(worker, "start", forking.ANEW)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where there is no CUDA GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA GPU here")
    for item in marked:
        item.add_marker(skip)
