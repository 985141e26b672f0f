"""Mixtures of experts that ranks share, by hand."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from tilefit import gpus
from tilefit.capture.child import capture_target
from tilefit.cost.links import NETWORKS, Fabric
from tilefit.cost.priced import PricedGpu, priced
from tilefit.ops import BACKWARD_WEIGHT, FORWARD, Collective, Gemm, Step
from tilefit.options import TargetOptions
from tilefit.parallel.blocks import Framework, Model
from tilefit.parallel.choices import TrainingSplit
from tilefit.parallel.experts import expert_parallel, experts_of
from tilefit.parallel.planning import Job, Planner, precision_of

H100 = priced(gpus.get("h100-sxm"))
CLUSTER = Fabric(H100, 8, NETWORKS["infiniband"])
#: 2 x 64 tokens, of which each goes to two of eight experts: 32 rows for each.
WIDTH, WIDE, EXPERTS, ROWS = 64, 128, 8, 2 * 64 * 2

LOOP = """
import torch, torch.nn as nn

class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(64, 8, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(8))

    def forward(self, x):
        flat = x.flatten(0, 1)
        order = self.router(flat).topk(2, -1).indices.flatten().argsort()
        rows = order.view(8, -1) // 2
        out = torch.cat([expert(flat[rows[i]]) for i, expert in enumerate(self.experts)])
        return x + torch.zeros_like(flat).index_add(0, rows.flatten(), out).view_as(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()
"""


@pytest.fixture(scope="module")
def mixtral() -> Step:
    sizes = {
        "hidden_size": WIDTH, "intermediate_size": WIDE, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256,
    }  # fmt: skip
    options = TargetOptions(batch=2, seq=64, fused_optimizer=True, weights="bf16", arguments=sizes)
    return capture_target("hf:mixtral", options)


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Step:
    file: Path = tmp_path_factory.mktemp("loop") / "loop.py"
    file.write_text(LOOP)
    options = TargetOptions(fused_optimizer=True, weights="bf16", input=("x: bf16[2,64,64]",))
    return capture_target(f"{file}:Model", options)


def products(step: Step, module: str) -> list[tuple[str, int, int, int, int]]:
    return [
        (e.phase, e.op.m, e.op.n, e.op.k, e.op.batch)
        for e in step.ops
        if isinstance(e.op, Gemm) and module in e.site.module
    ]


def messages(step: Step) -> list[tuple[str, int, int]]:
    return [(e.phase, e.op.elements, e.op.ranks) for e in step.ops if isinstance(e.op, Collective)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_grouped_products_over_ranks_by_hand(mixtral: Step, ranks: int) -> None:
    found = experts_of(mixtral, "model.layers")
    assert [(each.count, each.root) for each in found] == [(EXPERTS, "model.layers.0.mlp.experts")]
    step, _ = expert_parallel(mixtral, found, ranks)
    mine, rows = EXPERTS // ranks, ROWS // EXPERTS * ranks
    assert products(step, "mlp.experts")[:2] == [
        (FORWARD, rows, 2 * WIDE, WIDTH, mine),
        (FORWARD, rows, WIDTH, WIDE, mine),
    ]
    assert (BACKWARD_WEIGHT, WIDE, WIDTH, rows, mine) in products(step, "mlp.experts")
    # Two messages each way, each of all rows that a rank sends.
    assert [size for _, size, _ in messages(step)] == [ROWS * WIDTH] * 4
    assert {each for _, _, each in messages(step)} == {ranks}
    assert sum(phase == FORWARD for phase, _, _ in messages(step)) == 2
    assert step.parameters["model.layers.0.mlp.experts.down_proj"].shape == (mine, WIDTH, WIDE)
    assert step.parameters["model.layers.0.mlp.gate.weight"].shape == (EXPERTS, WIDTH)
    assert step.tensor_flop == mixtral.tensor_flop


def test_a_loop_over_experts_by_hand(loop: Step) -> None:
    found = experts_of(loop, "layers")
    assert [(each.count, each.root) for each in found] == [(8, f"layers.{i}.experts") for i in range(2)]
    step, _ = expert_parallel(loop, found, 4)
    # Two experts are left of eight, each with the rows of four ranks.
    forward = [each for each in products(step, "layers.0.experts") if each[0] == FORWARD]
    assert forward == [(FORWARD, 4 * 32, 128, 64, 1), (FORWARD, 4 * 32, 64, 128, 1)] * 2
    assert [size for _, size, _ in messages(step)] == [256 * 64] * 8
    left = {name for name in step.parameters if "layers.0.experts" in name}
    assert left == {f"layers.0.experts.{i}.{name}.weight" for i in (0, 1) for name in ("up", "down")}
    assert step.tensor_flop == loop.tensor_flop


def test_layers_without_a_router_have_no_experts(llama: Step) -> None:
    assert experts_of(llama, "model.layers") == []
    assert Model(llama).experts == 0


def test_tensor_parallel_ranks_have_different_experts_and_part_of_the_tokens(mixtral: Step) -> None:
    model = Model(mixtral)
    whole, part = (model.blocks(CLUSTER, 2, tensor, experts=8).layers[0] for tensor in (1, 2))
    assert whole.experts == part.experts == 3 * WIDTH * WIDE  # of one expert
    expert_flop = 3 * 2 * ROWS * 3 * WIDTH * WIDE
    router_flop = 3 * 2 * 128 * WIDTH * EXPERTS
    rest = whole.flop - expert_flop - router_flop
    assert part.flop == expert_flop // 2 + router_flop + rest // 2


def test_memory_and_messages_of_replicas_are_divided(mixtral: Step) -> None:
    planner = Planner(Model(mixtral), CLUSTER, Job(32, precision_of(mixtral)))
    total, experts = prod((8, 3, WIDTH, WIDE)), 8
    alone, shared = (
        planner.training(TrainingSplit(data=16, experts=each, samples=2)) for each in (1, experts)
    )
    saved = total - total // experts
    assert alone.memory().optimizer - shared.memory().optimizer == 12 * saved
    assert alone.memory().parameters - shared.memory().parameters == 2 * saved
    # FSDP shares what is left among the two ranks that have the same experts: as much as without.
    sharded = [
        planner.training(TrainingSplit(data=16, experts=each, samples=2, zero=3)) for each in (1, experts)
    ]
    assert sharded[0].memory().optimizer == pytest.approx(sharded[1].memory().optimizer)
    assert shared.time().tensor_s > alone.time().tensor_s == 0


def test_the_search_shares_experts_in_whole_numbers(mixtral: Step) -> None:
    planner = Planner(Model(mixtral), CLUSTER, Job(64, precision_of(mixtral)))
    found = {(split.tensor, split.experts) for split in planner.splits(16) if split.pipeline == 1}
    assert found == {(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (2, 8)}


def test_uneven_experts_take_longer(mixtral: Step) -> None:
    gpu: PricedGpu = H100
    model = Model(mixtral)
    even, uneven = (
        model.blocks(Fabric(gpu, 8), 4096, 1, Framework(imbalance=each), 8).layers[0] for each in (1.0, 1.25)
    )
    assert uneven.forward_s > even.forward_s
    assert uneven.forward_link_s > 1.15 * even.forward_link_s
