"""Modules that are left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from tilefit.fixes import RefusedError
from tilefit.fixes.changes.modules import require_plain, submodule


def test_a_path_that_is_not_there() -> None:
    with pytest.raises(RefusedError, match="no module 'head'"):
        submodule(nn.Linear(3, 4), "head")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: parametrizations.orthogonal(nn.Linear(3, 4)), "parametrisations"),
        (lambda: torch.jit.trace(nn.Linear(3, 4), torch.randn(2, 3)), "TopLevelTracedModule"),
        (lambda: torch.ao.nn.quantized.dynamic.Linear(3, 4), "quantized.dynamic"),
        (lambda: nn.LazyLinear(4), "LazyLinear"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_does_more_than_its_class_says(build: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        require_plain(build(), "layer", nn.Linear)


def test_old_weight_normalisation_is_only_a_hook() -> None:
    require_plain(weight_norm(nn.Linear(3, 4)), "layer", nn.Linear)
