"""One process of a program for several GPUs."""

from __future__ import annotations

import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from tilefit.capture.child import capture_program_in_child
from tilefit.cost import estimate_step
from tilefit.errors import TilefitError, UsageError
from tilefit.ops import OPTIMIZER, Attention
from tilefit.ops.program import EARLIER, WAIT
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
    parts = [torch.zeros(2, device="cuda") for _ in range(expected[1])]
    whole = torch.empty(2 * expected[1], device="cuda")
    distributed.all_gather(parts, total)
    distributed.all_gather_into_tensor(whole, total)
    assert parts[-1].tolist() == [1, 1]
    assert whole.sum().item() == 2 * expected[1]
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


_REPLICAS = """
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

distributed.init_process_group("nccl")

def replica(norm=False, **options):
    layers = [each for _ in range(3) for each in (nn.Linear(1024, 1024), nn.BatchNorm1d(1024))[: 1 + norm]]
    return nn.parallel.DistributedDataParallel(nn.Sequential(*layers).cuda(), **options)

usual, normed, small = replica(), replica(norm=True), replica(bucket_cap_mb=4)
searched, short = replica(find_unused_parameters=True), replica(gradient_as_bucket_view=True)
short.register_comm_hook(None, bf16_compress_hook)
nets = [usual, normed, small, searched, short]
optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.1)
x = torch.randn(64, 1024, device="cuda")
for step in range(4):
    for net in nets:
        net(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_LAYER = 4 * (1024 * 1024 + 1024)


def test_replicas_sum_gradients_in_buckets(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_REPLICAS)
    step = capture_program_in_child(ProgramOptions(str(path), ranks=16), "h100-sxm", 100)
    assert step.program is not None
    assert (step.program.ranks, step.program.per_machine) == (16, 8)
    found = [(each.name, each.bytes, each.dtype) for each in step.program.exchanges]
    sums = [each for each in found if each[0] == "all-reduce"]
    # The first bucket is full with 1 MiB, the second with 25; or both with what is asked for.
    usual = [_LAYER, 2 * _LAYER]
    norms = 4 * 2 * 1024
    assert [size for _, size, _ in sums[:2]] == usual
    assert sum(size for _, size, _ in sums[2:4]) == 3 * (_LAYER + norms)
    assert [size for _, size, _ in sums[4:7]] == [_LAYER] * 3
    used = 4 * 6  # which of six parameters were used
    assert sums[7:10] == [
        ("all-reduce", _LAYER, "fp32"),
        ("all-reduce", 2 * _LAYER, "fp32"),
        ("all-reduce", used, "int32"),
    ]
    assert sums[10:] == [("all-reduce", size // 2, "bf16") for size in usual]
    assert ("broadcast", 4 * 2 * 3 * 1024, "fp32") in found  # the statistics of the norms
    # A gradient is copied into its bucket, and out of it where the bucket is not its memory.
    copies = [each for each in step.ops if each.name == "aten.copy_" and "backward" in each.phase]
    assert len(copies) >= 6 * 4
    # Buckets are memory of gradients: of what was there before the step only x is an input.
    held = [block for block in step.memory.timeline.blocks.values() if block.owner == "inputs"]
    assert sum(block.size_bytes for block in held) == 4 * 64 * 1024


_SHARDED = """
import sys
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048, bias=False), nn.Linear(2048, 512, bias=False)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))
with torch.device("meta"):
    net = nn.Sequential(*(Mlp() for _ in range(3)))
for block in net:
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(block, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=sys.argv[1] == "reshard")
fully_shard(net, mesh=mesh["dp"])
net.to_empty(device="cuda")
for block in net:
    nn.init.trunc_normal_(block.up.weight, std=0.02)
optimizer = torch.optim.AdamW(net.parameters())
for step in range(4):
    net(torch.randn(32, 512, device="cuda", dtype=torch.bfloat16)).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_fully_shard_and_tensor_parallel_layers_exchange(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_SHARDED)
    kept, freed = (
        capture_program_in_child(ProgramOptions(str(path), (how,), ranks=8), "h100-sxm", 100)
        for how in ("keep", "reshard")
    )
    shard = 2 * 512 * 2048 // 2 * 2  # a block's weights in bf16, of one tensor-parallel rank
    for step in (kept, freed):
        assert step.program is not None
        over = {each.name: each.ranks for each in step.program.exchanges}
        assert over == {"all-gather": 4, "all-reduce": 2, "reduce-scatter": 4}
        sums = [each for each in step.program.exchanges if each.name == "all-reduce"]
        assert [each.bytes for each in sums] == [32 * 512 * 2] * len(sums)
        assert all(each.grows for each in sums)
        assert all(each.copied == (each.name != "all-reduce") for each in step.program.exchanges)
        gathered = [each for each in step.program.exchanges if each.name == "all-gather"]
        assert {each.bytes for each in gathered} == {shard}
        assert step.memory.parameter_bytes == 3 * 2 * 512 * 2048 * 4 // 8
        assert step.program.split == tuple(f"{i}.{name}" for i in range(3) for name in ("up", "down"))
        weights = {ref.parameter for each in step.ops if each.name == "aten.mm" for ref in each.inputs}
        assert {"0.up.weight", "2.down.weight"} <= weights
    count = [
        sum(each.name == "all-gather" for each in step.program.exchanges)  # type: ignore[union-attr]
        for step in (kept, freed)
    ]
    assert count == [3, 6]
    assert kept.memory.peak_bytes > freed.memory.peak_bytes
    streams = {each.stream for each in freed.program.order if each.kind == "exchange"}  # type: ignore[union-attr]
    assert len(streams) > 2  # of gathering, of scattering, of tensor-parallel sums


_FLAT = """
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

distributed.init_process_group("nccl")
layers = [nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU()) for _ in range(2)]
net = FullyShardedDataParallel(
    nn.Sequential(*layers), auto_wrap_policy=ModuleWrapPolicy({nn.ReLU, nn.Linear}), device_id=0,
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    net(torch.randn(32, 1024, device="cuda")).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_flat_parameters_gather_and_scatter(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_FLAT)
    step = capture_program_in_child(ProgramOptions(str(path), ranks=8), "h100-sxm", 100)
    assert step.program is not None
    found = {(each.name, each.bytes, each.dtype) for each in step.program.exchanges}
    size = 2 * 1024 * 1024
    assert {("all-gather", size, "bf16"), ("reduce-scatter", size, "bf16")} <= found
    # Before a third is gathered the host waits for the first to be done with, and for no more.
    waits = [each for each in step.program.events if each.kind == WAIT]
    assert waits
    assert all(each.event and each.name == EARLIER for each in waits)
    assert step.memory.parameter_bytes == 2 * 4 * 1024 * 1024 // 8


_PAIRS = """
import torch
from torch import distributed, nn

distributed.init_process_group("nccl")
rank, ranks = distributed.get_rank(), distributed.get_world_size()
net = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
sent = torch.zeros(1024, device="cuda")
got = torch.empty_like(sent)
for step in range(4):
    calls = [(distributed.isend, sent, (rank + 1) % ranks), (distributed.irecv, got, (rank - 1) % ranks)]
    for work in distributed.batch_isend_irecv([distributed.P2POp(*each) for each in calls]):
        work.wait()
    net(torch.randn(8, 64, device="cuda")).mean().backward()
    optimizer.step()
"""


def test_a_message_goes_over_the_link_to_its_receiver(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_PAIRS)
    step = capture_program_in_child(ProgramOptions(str(path), ranks=16), "h100-sxm", 100)
    assert step.program is not None
    found = {each.name: each for each in step.program.exchanges}
    # The next rank is in the same machine, the last one is in the other.
    assert {name: (each.ranks, each.per_machine) for name, each in found.items()} == {
        "send": (2, 2),
        "receive": (2, 1),
    }
    assert found["send"].group.endswith(" 0>1")
    assert found["receive"].group.endswith(" 15>0")
    assert all(each.grows for each in found.values())


_LIGHTNING = """
import pytorch_lightning
import torch
from torch import nn

class Net(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 64)

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.utils.data.TensorDataset(torch.randn(512, 64))
trainer = pytorch_lightning.Trainer(
    accelerator="gpu", devices=4, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False
)
trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
"""


@pytest.mark.skipif(not find_spec("pytorch_lightning"), reason="needs pytorch_lightning")
def test_lightning_on_several_gpus(tmp_path: Path) -> None:
    """It makes the loader anew, with a sampler of its own, by the arguments that a loader has."""
    path = tmp_path / "train.py"
    path.write_text(_LIGHTNING)
    step = capture_program_in_child(ProgramOptions(str(path), ranks=4), "h100-sxm", 100)
    assert step.program is not None
    sums = [(each.bytes, each.ranks) for each in step.program.exchanges if each.name == "all-reduce"]
    assert sums == [(4 * 65 * 64, 4)]
    assert step.batch == 8


_RING = """
import sys
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

mesh = init_device_mesh("cuda", (4,))
net = nn.Linear(256, 3 * 256, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    x = torch.randn(2, 1024, 256, device="cuda", dtype=torch.bfloat16)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        q, k, v = (each.unflatten(-1, (4, 64)).transpose(1, 2) for each in net(x).chunk(3, dim=-1))
        nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).float().mean().backward()
    optimizer.step()
"""


def test_context_parallel_attention_goes_round_a_ring(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_RING)
    step = capture_program_in_child(ProgramOptions(str(path), ranks=4), "h100-sxm", 100)
    kernels = [each.op for each in step.ops if isinstance(each.op, Attention)]
    assert len(kernels) == 2 * 4  # its own keys and those of three others, forward and backward
    whole = Attention(2, 4, 1024, 64, kv_len=1024, is_causal=True, dtype="bf16")
    forward = sum(each.flop for each in kernels[:4])
    assert forward == pytest.approx(whole.flop / 4, rel=0.01)
    assert step.program is not None
    moved = Counter(each.name for each in step.program.exchanges)
    assert moved == {"all-gather": 2, "all-to-all": 4}  # keys and values; their gradients go round
    gathered = next(each for each in step.program.exchanges if each.name == "all-gather")
    assert gathered.bytes == 2 * 2 * 4 * 1024 * 64 * 2


_UNUSED = """
import torch
from torch import distributed, nn

distributed.init_process_group("nccl")
net = nn.parallel.DistributedDataParallel(nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)]).cuda())
net.module.forward = lambda x: net.module[0](x)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    net(torch.randn(8, 64, device="cuda")).mean().backward()
    optimizer.step()
"""


def test_parameters_without_gradients_fail_as_in_pytorch(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_UNUSED)
    with pytest.raises(TilefitError, match="Expected to have finished reduction"):
        capture_program_in_child(ProgramOptions(str(path), ranks=2), "h100-sxm", 100)


_STAGES = """
import sys
import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble

distributed.init_process_group("nccl")
rank, ranks = distributed.get_rank(), distributed.get_world_size()
names = [None]
if rank == 0:
    names = ["of the first"]
distributed.broadcast_object_list(names, src=0)
assert names == ["of the first"]

class Part(nn.Sequential):
    pass

each = 2 if sys.argv[1] == "zero" else 1
mine = [rank + ranks * number for number in range(each)]
# The last stage does most, and hands on what is half as wide.
parts = [Part(*(nn.Linear(512, 512) for _ in range(4 if i == ranks * each - 1 else 1))).cuda() for i in mine]
stages = [PipelineStage(p, i, ranks * each, torch.device("cuda")) for p, i in zip(parts, mine)]
if each > 1:
    schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
else:
    schedule = Schedule1F1B(stages[0], 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
x, y = torch.randn(64, 512, device="cuda"), torch.randn(64, 512, device="cuda")
for step in range(4):
    last = {"target": y, "losses": []} if rank == ranks - 1 else {}
    schedule.step(*([x] if rank == 0 else []), **last)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("how", "passes"), [("1f1b", 4), ("zero", 8)])
def test_stages_of_a_pipeline_answer_each_other(how: str, passes: int, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_STAGES)
    step = capture_program_in_child(ProgramOptions(str(path), (how,), ranks=2), "h100-sxm", 200)
    assert [each.program.rank for each in step.ranks if each.program] == [0, 1]
    assert step.batch == 64
    assert step.program is not None
    messages = Counter(each.name for each in step.program.exchanges)
    size = 16 * 512 * 4
    assert {each.bytes for each in step.program.exchanges} == {size}
    # Of two stages on each rank the first sends forward to the second, and the second back to the third.
    assert messages == {"send": 4 if how == "1f1b" else 12, "receive": 4 if how == "1f1b" else 12}
    products = [sum(op.name.endswith("mm") for op in each.ops) for each in step.ranks]
    assert products[1] > products[0] >= 2 * passes  # forward, and of the weight
    found = estimate_step(step, "h100-sxm")
    assert found.streams is not None
    assert found.streams.unmet == 0
    assert sum(found.streams.late_s) > 0
    assert found.time_s >= max(found.streams.busy_s)


_REPLICATED = """
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "dp"))
stage = mesh["pp"].get_local_rank()
net = DistributedDataParallel(nn.Linear(512, 512).cuda(), process_group=mesh.get_group("dp"))
part = PipelineStage(net, stage, 2, torch.device("cuda"), group=mesh.get_group("pp"))
schedule = ScheduleGPipe(part, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(64, 512, device="cuda")
for step in range(4):
    schedule.step(x) if stage == 0 else schedule.step(target=x, losses=[])
    optimizer.step()
    optimizer.zero_grad()
"""


def test_replicas_of_stages_sum_gradients_behind_the_last_micro_batch(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_REPLICATED)
    step = capture_program_in_child(ProgramOptions(str(path), ranks=4), "h100-sxm", 200)
    assert [each.program.rank for each in step.ranks if each.program] == [0, 2]
    assert step.program is not None
    assert Counter(each.name for each in step.program.exchanges) == {"send": 4, "receive": 4, "all-reduce": 1}
    sums = [(each.bytes, each.ranks) for each in step.program.exchanges if each.name == "all-reduce"]
    assert sums == [(4 * (512 * 512 + 512), 2)]
    found = estimate_step(step, "h100-sxm")
    assert found.streams is not None
    assert found.streams.unmet == 0


def test_the_rank_that_is_looked_at_is_chosen(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_STAGES)
    step = capture_program_in_child(ProgramOptions(str(path), ("1f1b",), ranks=2, rank=1), "h100-sxm", 200)
    assert step.program is not None
    assert step.program.rank == 1
    assert step.memory.parameter_bytes == 4 * 4 * (512 * 512 + 512)
    with pytest.raises(UsageError, match="no rank 2 of 2"):
        ProgramOptions("train.py", ranks=2, rank=2)


_NORMED = """
import torch
from torch import distributed, nn

distributed.init_process_group("nccl")
net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 8))
net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    net(torch.randn(16, 3, 8, 8, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_norms_over_all_ranks_exchange_their_sums_and_wait(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_NORMED)
    step = capture_program_in_child(ProgramOptions(str(path), ranks=4), "h100-sxm", 100)
    assert step.program is not None
    sums = [(each.name, each.phase, each.bytes) for each in step.program.exchanges]
    assert sums == [
        ("all-gather", "forward", 4 * 4 * (2 * 32 + 1)),
        ("all-reduce", "backward-data", 4 * 2 * 32),
    ]
    # Which ranks had samples at all: it looks up counts, means and deviations.
    assert [each.name for each in step.program.events if each.blocks] == ["nonzero"] * 3
    norms = [each for each in step.ops if "batch_norm" in each.name]
    assert len(norms) == 5
    assert all(each.op.role == "normalization" for each in norms)  # type: ignore[attr-defined]


_OBJECTS = """
import torch
from torch import distributed, nn

distributed.init_process_group("nccl")
own = distributed.get_rank()
told, first = [None], own == 0
distributed.scatter_object_list(told, ["a", "b"] if first else None, src=0)
every = [None, None]
distributed.all_gather_object(object_list=every, obj=own)
sent = ["c"] if first else [None]
distributed.broadcast_object_list(object_list=sent, src=0)
assert (told, every, sent) == (["ab"[own]], [own, own], ["c"])
net = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    net(torch.randn(16, 8, device="cuda")).mean().backward()
    optimizer.step()
"""


def test_objects_go_to_the_ranks_that_they_are_for(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_OBJECTS)
    step = capture_program_in_child(ProgramOptions(str(path), ranks=2, rank=1), "h100-sxm", 100)
    assert step.program is not None
    assert step.program.rank == 1


_WAITING = """
import os
from torch import distributed

distributed.init_process_group("nccl")
if distributed.get_rank():
    {other}
else:
    distributed.recv_object_list([None], src=1)
"""


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ("pass", "rank 1: the program ended without a step"),
        ("os._exit(5)", "ran rank 1 exited with status 5"),
        ("os.abort()", "ran rank 1 was ended by SIGABRT"),
        ("distributed.recv_object_list([None], src=0)", r"did not finish within 15 s; rank 1 is at .*py:7$"),
    ],
)
def test_a_rank_that_fails_is_told_of(other: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_WAITING.format(other=other))
    with pytest.raises(TilefitError) as caught:
        capture_program_in_child(ProgramOptions(str(path), ranks=2), "h100-sxm", 15)
    assert re.search(told, caught.value.what)


@pytest.mark.parametrize(
    "message",
    [
        "recv_object_list([None], src=7)",
        "send_object_list([1], dst=7)",
        "broadcast_object_list([None], group_src=7)",
        "send(torch.ones(3, device='cuda'), dst=7)",
    ],
)
def test_a_rank_that_does_not_exist_is_said_to_be_none(message: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    lines = "import torch", "from torch import distributed", "distributed.init_process_group('nccl')"
    path.write_text("\n".join([*lines, f"distributed.{message}"]))
    with pytest.raises(TilefitError, match="a message with rank 7, and there are 2: 0 to 1") as caught:
        capture_program_in_child(ProgramOptions(str(path), ranks=2), "h100-sxm", 60)
    assert str(caught.value.where).endswith("train.py:4")


_SPAWNED = """
import torch
from torch import distributed, nn

def main(process):
    distributed.init_process_group("nccl", rank=process, world_size=2)
    got = torch.zeros({wanted}, device="cuda")
    distributed.recv(got, src=1) if process == 0 else distributed.send(torch.ones(3, device="cuda"), dst=0)
    assert process or got.tolist() == [1, 1, 1]
    net = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        net(torch.randn(16, 64, device="cuda")).mean().backward()
        optimizer.step()

if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)
"""


def test_a_spawned_process_is_the_rank_that_it_runs_for(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_SPAWNED.format(wanted=3))
    step = capture_program_in_child(ProgramOptions(str(path), ranks=2), "h100-sxm", 100)
    assert [each.program.rank for each in step.ranks if each.program] == [0, 1]
    path.write_text(_SPAWNED.format(wanted=5))
    with pytest.raises(TilefitError, match="expects 5 values of rank 1, which has sent 3") as caught:
        capture_program_in_child(ProgramOptions(str(path), ranks=2), "h100-sxm", 100)
    assert caught.value.where.endswith("train.py:8")


def test_ranks_are_told_to_the_program_as_torchrun_does() -> None:
    assert ProgramOptions("train.py").environment == {}
    told = ProgramOptions("train.py", ranks=32, nodes=8).environment
    assert (told["RANK"], told["WORLD_SIZE"], told["LOCAL_WORLD_SIZE"]) == ("0", "32", "4")
    assert ProgramOptions("train.py", ranks=32).environment["LOCAL_WORLD_SIZE"] == "8"
    with pytest.raises(TilefitError, match="3 machines do not share 32 processes"):
        ProgramOptions("train.py", ranks=32, nodes=3)


def test_an_optimizer_of_shared_state_is_fused_as_it_was_told(tmp_path: Path) -> None:
    """`ZeroRedundancyOptimizer` passes its groups on to the one that steps."""
    path = tmp_path / "train.py"
    path.write_text("""
import torch
from torch import distributed, nn
distributed.init_process_group("nccl")
net = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda())
from torch.distributed.optim import ZeroRedundancyOptimizer
optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
for _ in range(4):
    net(torch.randn(16, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""")
    step = capture_program_in_child(ProgramOptions(str(path), ranks=2), "h100-sxm", 100)
    assert [e.name for e in step.ops if e.phase == OPTIMIZER and e.op.role == "optimizer"] == ["fused_adamw"]
