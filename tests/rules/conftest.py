"""Two GPUs, and models of which only the shapes are read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from capturing import without_initial_values
from tilefit import gpus
from tilefit.gpus import Gpu


@pytest.fixture(scope="module", autouse=True)
def _shapes_alone() -> Iterator[None]:
    with without_initial_values():
        yield


@pytest.fixture
def h200() -> Gpu:
    return gpus.get("h200")


@pytest.fixture
def a100() -> Gpu:
    return gpus.get("a100-sxm-80gb")
