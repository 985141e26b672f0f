"""Whatever holds or wraps a model holds and wraps a fixed one, and their checkpoints are the same."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from alone import alone
from fixing import fixed
from tilefit.fixes.changes.behaviour import behaves
from tilefit.fixes.kinds.padding.layers import Fitted


class Model(nn.Module):
    """Layers in a chain, and a head that shares its weight with a table of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(101, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 21), nn.GELU(), nn.Linear(21, 16))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 101)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.mlp(self.table(ids))))


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module]:
    """A model in fp64, and the same one fixed."""
    model = Model()
    ids = torch.zeros(16, 512, dtype=torch.int64, device="meta")
    changed = fixed(model, (ids,), select=["ALN"]).model
    assert sum(behaves(module, Fitted) for module in changed.modules()) == 3
    return model.double(), changed.double()


def batch(number: int) -> torch.Tensor:
    return torch.randint(0, 101, (2, 5), generator=torch.Generator().manual_seed(number))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[int] | range) -> list[float]:
    losses = []
    for number in steps:
        ids = batch(number)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def through_a_file(data: Any) -> Any:
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("first", [0, 1])
def test_a_half_trained_run_goes_on_in_the_other_model(pair: tuple[nn.Module, nn.Module], first: int) -> None:
    """From the original into the fixed one and back, with the state of the optimizer."""
    reference = copy.deepcopy(pair[0])
    expected = train(reference, adamw(reference), range(12))
    models = (pair[first], pair[1 - first], pair[first])
    losses: list[float] = []
    state = optimizer_state = None
    for number, model in enumerate(models):
        optimizer = adamw(model)
        if state is not None:
            model.load_state_dict(state, strict=True)
            optimizer.load_state_dict(optimizer_state)
        losses += train(model, optimizer, range(4 * number, 4 * number + 4))
        state, optimizer_state = through_a_file((model.state_dict(), optimizer.state_dict()))
    assert losses == pytest.approx(expected, rel=1e-9)


def test_safetensors(pair: tuple[nn.Module, nn.Module], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, changed = pair
    safetensors.save_model(changed, tmp_path / "model.safetensors")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    safetensors.load_model(model, tmp_path / "model.safetensors")
    torch.testing.assert_close(model(batch(0)), changed(batch(0)), rtol=1e-12, atol=1e-12)
    safetensors.load_model(changed, tmp_path / "model.safetensors")


def test_weight_averaging(pair: tuple[nn.Module, nn.Module]) -> None:
    averages = []
    for model in pair:
        averaged = torch.optim.swa_utils.AveragedModel(model)
        optimizer = adamw(model)
        for number in range(3):
            train(model, optimizer, range(number, number + 1))
            averaged.update_parameters(model)
        averages.append(averaged(batch(0)))
    torch.testing.assert_close(*averages, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_under_the_compiler(pair: tuple[nn.Module, nn.Module], backend: str) -> None:
    model, changed = pair
    expected = train(model, adamw(model), range(3))
    compiled = torch.compile(changed, backend=backend, fullgraph=True)
    assert train(compiled, adamw(changed), range(3)) == pytest.approx(expected, rel=1e-9)
    assert isinstance(compiled.state_dict()["_orig_mod.head.weight"], torch.Tensor)


# ---- more than one process ---------------------------------------------------------------------


@pytest.fixture
def process_group() -> Iterator[None]:
    with alone():
        yield


@pytest.mark.usefixtures("process_group")
def test_ddp(pair: tuple[nn.Module, nn.Module]) -> None:
    model, changed = pair
    expected = train(model, adamw(model), range(3))
    wrapped = nn.parallel.DistributedDataParallel(changed)
    assert train(wrapped, adamw(wrapped), range(3)) == pytest.approx(expected, rel=1e-9)
    model.load_state_dict(wrapped.module.state_dict(), strict=True)


@pytest.mark.usefixtures("process_group")
def test_fsdp(pair: tuple[nn.Module, nn.Module]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model, changed = pair
    expected = train(model, adamw(model), range(3))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(changed.mlp, mesh=mesh)
    fully_shard(changed, mesh=mesh)
    assert train(changed, adamw(changed), range(3)) == pytest.approx(expected, rel=1e-9)
    whole = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in changed.state_dict().items()}
    model.load_state_dict(whole, strict=True)
