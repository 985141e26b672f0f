"""Models of which only the shapes are read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from capturing import without_initial_values


@pytest.fixture(scope="module", autouse=True)
def _shapes_alone() -> Iterator[None]:
    with without_initial_values():
        yield
