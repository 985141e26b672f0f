from __future__ import annotations

import pytest

from tilefit import gpus
from tilefit.gpus import Gpu


@pytest.fixture
def h200() -> Gpu:
    return gpus.get("h200")


@pytest.fixture
def a100() -> Gpu:
    return gpus.get("a100-sxm-80gb")
