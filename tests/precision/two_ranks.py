"""One of the two ranks that test_ranks starts: runs the cases named and prints what was found in each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer

from tilefit.precision import Watch, ranks

STEPS = 4
DEVICE = "cpu"
Case = Callable[[Watch], None]
CASES: dict[str, Case] = {}


def case(run: Case) -> Case:
    CASES[run.__name__] = run
    return run


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(DEVICE)


def ddp(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, device_ids=[dist.get_rank()] if DEVICE != "cpu" else None)


def loss_of(model: nn.Module, dtype: torch.dtype = torch.bfloat16, seed: int | None = None) -> Tensor:
    if seed is not None:
        torch.manual_seed(seed)
    x, y = torch.randn(8, 8, device=DEVICE), torch.randn(8, 4, device=DEVICE)
    with torch.autocast(torch.device(DEVICE).type, dtype=dtype):
        return nn.functional.mse_loss(model(x).float(), y)


def scaler(**kw: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(torch.device(DEVICE).type, **kw)  # type: ignore[arg-type]


def train(model: nn.Module, optimizer: Optimizer, seeds: bool = True) -> None:
    torch.manual_seed(dist.get_rank() if seeds else 0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


# ---- wrong ---------------------------------------------------------------------------------------


@case
def inner_model_called(w: Watch) -> None:
    model = net()
    ddp(model)
    train(model, SGD(model.parameters(), lr=0.1))


@case
def parameters_not_broadcast(w: Watch) -> None:
    model = net(dist.get_rank())
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
        optimizer.step()


@case
def clipped_on_one_rank(w: Watch) -> None:
    model = ddp(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        if dist.get_rank() == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


@case
def scale_per_rank(w: Watch) -> None:
    model, s = ddp(net()), scaler(init_scale=2.0 ** (10 + dist.get_rank()))
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(loss_of(model, torch.float16)).backward()
        s.step(optimizer)
        s.update()


@case
def inf_on_one_rank(w: Watch) -> None:
    model, s = net(), scaler()
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for step in range(STEPS):
        optimizer.zero_grad()
        s.scale(loss_of(model, torch.float16)).backward()
        s.unscale_(optimizer)
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
        if step == 1 and dist.get_rank() == 1:
            optimizer.found = True  # type: ignore[attr-defined]
            s._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {
                torch.device(DEVICE): torch.ones((), device=DEVICE)
            }
        s.step(optimizer)
        s.update()


@case
def same_data(w: Watch) -> None:
    model = ddp(net())
    train(model, SGD(model.parameters(), lr=0.1), seeds=False)


# ---- right ---------------------------------------------------------------------------------------


@case
def ddp_plain(w: Watch) -> None:
    model = ddp(net())
    train(model, SGD(model.parameters(), lr=0.1))


CASES["ddp"] = ddp_plain


@case
def ddp_with_a_scaler(w: Watch) -> None:
    model, s = DistributedDataParallel(net(), gradient_as_bucket_view=True), scaler()
    optimizer = Adam(model.parameters())
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(loss_of(model, torch.float16)).backward()
        s.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        s.step(optimizer)
        s.update()


@case
def ddp_accumulates_without_sync(w: Watch) -> None:
    model, s = ddp(net()), scaler()
    optimizer = Adam(model.parameters())
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            with model.no_sync() if micro == 0 else nullcontext():
                s.scale(loss_of(model, torch.float16) / 2).backward()
        s.step(optimizer)
        s.update()


@case
def manual_all_reduce(w: Watch) -> None:
    model, s = net(), scaler()
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        s.scale(loss_of(model, torch.float16)).backward()
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        s.step(optimizer)
        s.update()


@case
def zero_optimizer(w: Watch) -> None:
    model = ddp(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=SGD, lr=0.1)
    train(model, optimizer)


@case
def sharded_parameters(w: Watch) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(torch.device(DEVICE).type, (2,))
    model = net()
    for layer in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    train(model, Adam(model.parameters()))


@case
def watched_on_one_rank(w: Watch) -> None:
    if dist.get_rank() == 1:
        w.stop()
    ranks.TIMEOUT_S = 1.0
    model = ddp(net())
    train(model, SGD(model.parameters(), lr=0.1))


def main() -> None:
    global DEVICE
    backend, names = sys.argv[1], sys.argv[2:]
    dist.init_process_group(backend)
    if backend == "nccl":
        torch.cuda.set_device(dist.get_rank())
        DEVICE = f"cuda:{dist.get_rank()}"
    found: dict[str, list[dict[str, object]]] = {}
    for name in names:
        with Watch() as w:
            CASES[name](w)
        found[name] = [asdict(alarm) for alarm in w.alarms]
        found[name] += [{"unchecked": what} for what in w.report().unchecked]
        dist.barrier()
    print(json.dumps(found))
    dist.destroy_process_group()


main()
