from __future__ import annotations

import pytest
import torch

from tilefit.fixes.kinds.padding import tensors as padding


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["small", "large"])
def any_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors go the way of small ones, and that of large ones."""
    if request.param == "large":
        monkeypatch.setattr(padding, "SMALL", 0)
