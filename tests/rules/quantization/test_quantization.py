"""QNT: tiles, waves, small dimensions; silent unless the change pays."""

from __future__ import annotations

import pytest

from builders import StepBuilder, gpt2, llama
from tilefit.cost import estimate_step
from tilefit.gpus import Gpu
from tilefit.ops import Step
from tilefit.rules import run


def mlp(rows: int, features: int, hidden: int, batch: int = 16, layers: int = 4) -> Step:
    b = StepBuilder(batch)
    for i in range(layers):
        b.linear(f"layers.{i}.up", rows, features, hidden)
        b.linear(f"layers.{i}.down", rows, hidden, features)
    return b.step()


def test_a_batch_just_above_whole_waves_names_a_smaller_one(a100: Gpu) -> None:
    """Over all batches: what is advised is smaller, and does more samples per second."""

    def rate(batch: int) -> float:
        return batch / estimate_step(mlp(64 * batch, 8192, 8192, batch), a100).time_s

    advised = {}
    for batch in range(9, 33):
        for finding in run(mlp(64 * batch, 8192, 8192, batch), a100, select=["QNT002"]):
            advised[batch] = int(finding.fix.split("batch of ")[1].split()[0])
            assert finding.safety == "throughput"
    assert advised
    for batch, better in advised.items():
        assert better < batch
        assert rate(better) > 1.03 * rate(batch)
    assert not set(advised) & set(advised.values())


@pytest.mark.parametrize("gpu_name", ["h200", "a100"])
def test_healthy_models_are_left_alone(gpu_name: str, request: pytest.FixtureRequest) -> None:
    gpu = request.getfixturevalue(gpu_name)
    assert run(gpt2(), gpu, select=["QNT"]) == []
    assert run(llama(), gpu, select=["QNT"]) == []


def test_memory_bound_products_are_no_matter_of_tiles(h200: Gpu) -> None:
    assert run(mlp(16, 4096, 1032), h200, select=["QNT"]) == []
