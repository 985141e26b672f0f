"""One process of a program for several GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilefit.capture.child import capture_program_in_child
from tilefit.options import ProgramOptions

_PROGRAM = """
import os
import torch
from torch import distributed, nn

def main(rank, expected):
    assert "RANK" not in os.environ or expected == (3, 8)
    assert os.environ.get("LOCAL_RANK") is None
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl")
    assert (distributed.get_rank(), distributed.get_world_size()) == expected
    total = torch.ones(2, device="cuda")
    distributed.all_reduce(total)
    distributed.barrier()
    net = nn.parallel.DistributedDataParallel(nn.Linear(64, 32).cuda(), device_ids=[0])
    assert [name for name, _ in net.named_parameters()] == ["module.weight", "module.bias"]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(5):
        with net.no_sync():
            assert not net.require_backward_grad_sync
            net(torch.randn(16, 64, device="cuda")).mean().backward()
        assert net.require_backward_grad_sync
        net(torch.randn(16, 64, device="cuda")).mean().backward()
        optimizer.step()
        distributed.all_reduce(total, async_op=True).wait()
        optimizer.zero_grad()

expected = (3, 8) if "RANK" in os.environ else (0, 1)
torch.multiprocessing.spawn(main, args=(expected,), nprocs=1)
"""


@pytest.mark.parametrize("ranks", [1, 8])
def test_one_process_of_a_program_runs_alone(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "8"}.items():
        if ranks > 1:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    path = tmp_path / "train.py"
    path.write_text(_PROGRAM)
    step = capture_program_in_child(ProgramOptions(str(path)), "h100-sxm", 100)

    assert step.program is not None
    assert step.program.step.startswith("2 micro-batches of 16, SGD")
    assert step.program.ranks == ranks
    found = [(each.name, each.bytes, each.ranks, each.phase) for each in step.program.exchanges]
    gradients = 4 * (64 * 32 + 32)  # of the second micro-batch alone
    called = [("all-reduce", 8, 8, "forward"), ("all-reduce", gradients, 8, "backward-data")]
    assert found == called * (ranks > 1)
