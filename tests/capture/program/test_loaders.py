"""The loaders that feed a step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tilefit.capture.program.fake_data import fake_data
from tilefit.capture.program.loaders import Loaders
from tilefit.capture.torchvision_import import tolerated


class _Slow(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.full((3,), float(index))


def test_the_loaders_that_feed_the_step_are_named_and_timed() -> None:
    with Loaders().watching() as loaders:
        idle = DataLoader(TensorDataset(torch.zeros(4)))
        loader = DataLoader(_Slow(), batch_size=8, shuffle=True, num_workers=0)
        batches = iter(loader)
        next(iter(idle))
        next(batches)
        loaders.stepped()
        next(batches)
        next(batches)
        (found,) = loaders.of_step()
    assert Path(found.source.partition(":")[0]).name == "test_loaders.py"
    assert (found.batch, found.workers, found.pinned, found.timed, found.drawn) == (8, 0, False, 4, 2)
    assert 0.016 < found.batch_s < 0.2


def test_what_workers_would_do_is_said() -> None:
    with Loaders().watching() as loaders:
        loader = DataLoader(_Slow(), batch_size=4, num_workers=2, pin_memory=False)
        loaders._fed[id(loader)] = loader, 1  # no process is started for it
        (found,) = loaders.of_step()
    assert (found.batch, found.workers) == (4, 2)


def test_a_batch_that_takes_long_is_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilefit.capture.program.loaders._PATIENCE_S", 0.01)
    found: list[str] = []
    with Loaders(found=found).watching() as loaders:
        batches = [*DataLoader(_Slow(), batch_size=16, shuffle=True)]
        (loader,) = loaders.of_step()
    assert len(batches) == 4
    assert all(torch.equal(batches[0], each) and batches[0] is not each for each in batches[1:])
    assert "again and again" in found[0]
    assert loader.timed == 1
    assert loader.batch_s > 0.03


def test_the_time_that_workers_take_to_start_is_no_batch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilefit.capture.program.loaders._PATIENCE_S", 0.01)
    with Loaders().watching() as loaders:
        slow = {"num_workers": 1, "worker_init_fn": lambda number: time.sleep(1)}
        next(iter(DataLoader(_Slow(), batch_size=8, **slow)))
        (loader,) = loaders.of_step()
    assert 0.016 < loader.batch_s < 0.5


def test_workers_that_persist_give_each_epoch_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilefit.capture.program.loaders._PATIENCE_S", 0.01)
    with Loaders().watching() as loaders:
        loader = DataLoader(_Slow(), batch_size=16, num_workers=1, persistent_workers=True)
        assert [len([*loader]) for _ in range(2)] == [4, 4]
        for _ in loader:
            loaders.end_epoch()
        assert len([*loader]) == 4


def test_timing_leaves_random_numbers_alone() -> None:
    with Loaders().watching() as loaders:
        for _ in DataLoader(_Slow(), batch_size=32, shuffle=True):
            break
        torch.manual_seed(0)
        loaders.of_step()
        after = torch.rand(3)
        torch.manual_seed(0)
        assert torch.equal(after, torch.rand(3))


def test_a_stream_is_not_read_on() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(range(8))

    with Loaders().watching() as loaders:
        rows = iter(DataLoader(Stream(), batch_size=2))
        next(rows)
        (found,) = loaders.of_step()
        assert (found.timed, found.batch_s) == (0, 0.0)
        assert next(rows).tolist() == [2, 3]


def test_a_loader_without_a_batch_size_yields_batches() -> None:
    class Batches(Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"x": torch.zeros(32, 5)}

    with Loaders().watching() as loaders:
        next(iter(DataLoader(Batches(), batch_size=None)))
        (found,) = loaders.of_step()
    assert found.batch == 32


def test_made_up_data_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tolerated():
        torchvision = pytest.importorskip("torchvision")
    monkeypatch.chdir(tmp_path)
    with fake_data([]) as sources, Loaders(lambda: sources.used).watching() as loaders:
        images = torchvision.datasets.MNIST("no", transform=torchvision.transforms.ToTensor())
        next(iter(DataLoader(images, batch_size=4)))
        (found,) = loaders.of_step()
    assert (found.batch, found.timed) == (4, 0)
