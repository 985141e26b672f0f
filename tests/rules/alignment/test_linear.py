"""ALN001: features of linear layers."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from builders import StepBuilder, gpt2, llama
from tilefit.capture import capture
from tilefit.cost import estimate_step
from tilefit.gpus import Gpu
from tilefit.ops import Gemm
from tilefit.rules import get, run
from tilefit.rules.base import Context
from whatif import findings


def test_layers_that_share_a_size_are_one_finding(h200: Gpu) -> None:
    (finding,) = run(llama(intermediate=5461, features=2048), h200, select=["ALN"])
    assert finding.code == "ALN001"
    assert finding.sites == 6
    assert finding.module == "model.layers.*.mlp.*"
    assert "out_features of model.layers.*.mlp.* 5461 -> 5504" in finding.fix
    assert "in_features of model.layers.*.mlp.down_proj 5461 -> 5504" in finding.fix
    assert "sm75" in finding.message


def test_identical_layers_are_one_finding_with_their_pattern(h200: Gpu) -> None:
    b = StepBuilder()
    for i in range(12):
        b.linear(f"transformer.h.{i}.mlp.c_fc", 16384, 768, 3071, conv1d=True)
    (finding,) = run(b.step(), h200, select=["ALN"])
    assert (finding.module, finding.sites) == ("transformer.h.*.mlp.c_fc", 12)


def test_a_model_that_is_one_layer_has_no_path_to_name(h200: Gpu) -> None:
    b = StepBuilder()
    b.linear("", 16384, 768, 3071)
    (finding,) = run(b.step(), h200, select=["ALN"])
    assert finding.fix.startswith("Change out_features 3071 -> 3072 ")


def test_the_change_covers_the_products_and_what_lies_between(h200: Gpu) -> None:
    step = llama(intermediate=5461, features=2048, layers=1)
    (proposal,) = get("ALN001").check(Context(step, h200, estimate_step(step, h200)))
    assert proposal.change is not None
    replaced = proposal.change.replace
    for index, entry in enumerate(step.ops):
        if isinstance(entry.op, Gemm):
            assert (index in replaced) == (5461 in (entry.op.m, entry.op.n, entry.op.k))
    activation = next(i for i, entry in enumerate(step.ops) if entry.name == "aten.silu")
    assert replaced[activation][0].op.moved_bytes == pytest.approx(
        step.ops[activation].op.moved_bytes * 5504 / 5461, rel=1e-6
    )


def test_two_misaligned_sizes_of_one_layer_are_padded_together(h200: Gpu) -> None:
    b = StepBuilder()
    b.linear("a", 16384, 2050, 2050)
    b.linear("b", 16384, 2050, 4099)
    (finding,) = run(b.step(), h200, select=["ALN"])
    assert "2050 and 4099 features" in finding.message


class Gated(nn.Module):
    """A gate whose halves one layer makes."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 2 * hidden), nn.Linear(hidden, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Attending(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Modulated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation, self.layer = nn.Linear(width, 6 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift, scale, gate, *_ = self.modulation(F.silu(x)).chunk(6, -1)
        return x + gate * self.layer(x * scale + shift)


class WideBehind(nn.Module):
    """A layer that autocast leaves in TF32 behind one in bf16."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, hidden), nn.Linear(hidden, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        with torch.autocast("cuda", enabled=False):
            return self.down(x.float())


@pytest.mark.parametrize(
    ("model", "width", "changes"),
    [
        pytest.param(
            Gated(5461),
            1024,
            ["in_features of down 5461 -> 5504", "out_features of up 10922 -> 11008"],
            id="halves",
        ),
        pytest.param(
            Gated(5460),
            1024,
            ["in_features of down 5460 -> 5504", "out_features of up 10920 -> 11008"],
            id="halves of what is aligned",
        ),
        pytest.param(
            Attending(650, 10),
            650,
            ["out_features of out 650 -> 720", "out_features of qkv 1950 -> 2160", "heads of 65 -> 72"],
            id="heads",
        ),
        pytest.param(
            Modulated(1302),
            1302,
            ["of * 1302 -> 1344", "out_features of modulation 7812 -> 8064"],
            id="a modulation",
        ),
        pytest.param(
            WideBehind(5462),
            1024,
            ["out_features of up 5462 -> 5504", "in_features of down 5462 -> 5504"],
            id="types",
        ),
    ],
)
def test_sizes_that_belong_together_still_fit(model: nn.Module, width: int, changes: list[str]) -> None:
    step = capture(model, torch.empty(16, 1024, width), amp="bf16", tf32=True)
    (finding,) = findings(step, "ALN001")
    assert all(change in finding.fix for change in changes)
    assert "10920" not in finding.message


@pytest.mark.parametrize("outputs", [1, 10, 25])
def test_few_outputs_are_no_part_of_what_they_divide(outputs: int) -> None:
    """A head of one value or of ten classes: 650 features are not 650 times one."""
    layers = nn.Linear(650, 650), nn.ReLU(), nn.Linear(650, 650), nn.ReLU(), nn.Linear(650, outputs)
    step = capture(nn.Sequential(*layers), torch.empty(1 << 20, 650, device="meta"), amp="bf16")
    (finding,) = findings(step, "ALN001")
    assert re.search(r"in_features of \* 650 -> (656|704)", finding.fix)


def test_the_smaller_padding_is_taken_where_a_line_costs_more(h200: Gpu) -> None:
    b = StepBuilder()
    for i in range(8):
        b.linear(f"wide.{i}", 65536, 4096, 129)
    found = run(b.step(), h200, select=["ALN"])
    assert len(found) == 1
    assert "129 -> 136" in found[0].fix or "129 -> 192" in found[0].fix
    sizes = [int(text.split("-> ")[1].split()[0]) for text in [found[0].fix]]
    assert sizes[0] % 8 == 0


def test_a_small_head_is_not_worth_a_finding(h200: Gpu) -> None:
    step_builder = StepBuilder()
    for i in range(12):
        step_builder.linear(f"layer.{i}", 16384, 768, 3072)
    step_builder.linear("classifier", 32, 768, 2)
    assert run(step_builder.step(), h200, select=["ALN"]) == []


def test_fp32_without_tf32_has_no_tensor_cores_to_lose(h200: Gpu) -> None:
    b = StepBuilder(dtype="fp32")
    b.linear("a", 16384, 2047, 2047)
    assert run(b.step(), h200, select=["ALN"]) == []


def test_tf32_needs_multiples_of_four(h200: Gpu) -> None:
    for size, count in ((2044, 0), (2046, 1)):
        b = StepBuilder(dtype="tf32")
        b.linear("a", 16384, size, size)
        assert len(run(b.step(), h200, select=["ALN001"])) == count


@pytest.mark.parametrize("gpu_name", ["h200", "a100"])
def test_healthy_models_are_left_alone(gpu_name: str, request: pytest.FixtureRequest) -> None:
    gpu = request.getfixturevalue(gpu_name)
    assert run(gpt2(50304, layers=12), gpu, select=["ALN", "QNT", "LAY"]) == []
    assert run(llama(), gpu, select=["ALN", "QNT", "LAY"]) == []


class Between(nn.Module):
    """A layer that is padded, and what its features go through."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], features: int = 4097) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(4096, features), nn.Linear(features, 64), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x)))


@pytest.mark.parametrize(
    ("between", "together"),
    [
        (F.gelu, ""),
        (lambda y: F.layer_norm(y, y.shape[-1:]), "normalization"),
        (lambda y: torch.softmax(y, -1), "softmax"),
        (lambda y: y * torch.rsqrt(y.square().mean(-1, keepdim=True)), "mean"),
    ],
    ids=["gelu", "layer norm", "softmax", "rms by hand"],
)
def test_zeros_among_trained_weights_are_advised_where_nothing_takes_all_features_together(
    between: Callable[[torch.Tensor], torch.Tensor], together: str
) -> None:
    step = capture(Between(between), torch.empty(8192, 4096, device="meta"), amp="bf16")
    (finding,) = findings(step, "ALN001")
    assert ("pad trained weights with zeros" in finding.fix) is not bool(together)
    assert (f"would change the {together} over them; tilefit fix" in finding.fix) is bool(together)


def test_outputs_that_are_compared_with_numbers_are_no_vocabulary() -> None:
    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4096, 8193)

        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(self.head(x), targets)

    inputs = (torch.empty(8192, 4096, device="meta"), torch.empty(8192, 8193, device="meta"))
    step = capture(Regression(), inputs, amp="bf16")
    (finding,) = findings(step, "ALN")
    assert finding.code == "ALN001"
    assert "would change the loss over them" in finding.fix
