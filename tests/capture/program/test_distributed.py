"""One process of a program for several GPUs."""

from __future__ import annotations

import os

import pytest
import torch
from torch import distributed, nn

from tilefit.capture.program.distributed import one_rank, rank_notes


def test_a_process_that_nobody_started_with_others_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    real = nn.parallel.DistributedDataParallel
    with one_rank():
        distributed.init_process_group("nccl")
        assert (distributed.get_rank(), distributed.get_world_size()) == (0, 1)
        assert os.environ["LOCAL_RANK"] == "0"
        assert rank_notes() == []
        distributed.all_reduce(torch.ones(2))
        net = nn.parallel.DistributedDataParallel(nn.Linear(2, 3), device_ids=[0])
        assert net(torch.ones(1, 2)).shape == (1, 3)
        assert [name for name, _ in net.named_parameters()] == ["module.weight", "module.bias"]
        with net.no_sync():
            assert not net.require_backward_grad_sync
        assert net.require_backward_grad_sync
        distributed.destroy_process_group()
    assert nn.parallel.DistributedDataParallel is real
    assert "WORLD_SIZE" not in os.environ


def test_ranks_are_those_of_the_environment_or_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    with one_rank():
        distributed.init_process_group()
        assert (distributed.get_rank(), distributed.get_world_size()) == (3, 8)
        assert "one of 8 processes" in rank_notes()[0]
        distributed.destroy_process_group()
        distributed.init_process_group("gloo", rank=1, world_size=2)
        assert (distributed.get_rank(), distributed.get_world_size()) == (1, 2)
        distributed.destroy_process_group()
