"""On a GPU: what is captured on shapes is what a real training step executes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "capture_vs_cuda.py"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("capture_vs_cuda", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["capture_vs_cuda"] = module
    spec.loader.exec_module(module)
    return module


script = _script()


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(script.MODELS))
def test_the_captured_products_are_the_executed_ones(name: str) -> None:
    result = script.compare(name)
    assert result["operations"] > 0
    assert result["only_captured"] == {}
    assert result["only_executed"] == {}
