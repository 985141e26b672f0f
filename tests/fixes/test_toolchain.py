"""PyTorch's tools see changed models as the plain ones, or are told to strip them."""

from __future__ import annotations

import pytest

import tilefit
from fixable import KINDS
from in_use import difference
from toolchain import STRIP_FIRST, STRIPPED, TOOLS, WORKS, changed, used, verdict


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_works_or_says_what_to_do(tool: str, kind: str) -> None:
    expected = STRIPPED if kind in STRIP_FIRST.get(tool, ()) else WORKS
    assert verdict(tool, kind) == expected


@pytest.mark.parametrize("name", KINDS)
def test_a_stripped_model_is_plain(name: str) -> None:
    kind = KINDS[name]
    plain, model, _ = changed(kind)
    assert tilefit.strip(model) is model
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    for tool in (tool for tool, kinds in STRIP_FIRST.items() if name in kinds):
        assert not difference(used(TOOLS[tool], plain, kind), used(TOOLS[tool], model, kind))
