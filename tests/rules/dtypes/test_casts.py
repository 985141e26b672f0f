"""PRC004, PRC005: casts that only cost time."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tilefit.capture import capture
from toys import Attention, LanguageModel, tokens
from whatif import findings, saved_s


class Norm(nn.Module):
    """Layer normalisation computed in fp32: written out, or by the kernel itself."""

    def __init__(self, *, written_out: bool) -> None:
        super().__init__()
        self.written_out = written_out
        self.weight = nn.Parameter(torch.ones(2048))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.written_out:
            return F.layer_norm(x, (2048,), self.weight)
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def model_of(*, written_out: bool, layers: int = 3) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(Norm(written_out=written_out), nn.Linear(2048, 2048)) for _ in range(layers))
    ).bfloat16()


X = torch.empty(16384, 2048, device="meta", dtype=torch.bfloat16)


def test_its_gradient_belongs_to_it() -> None:
    training = capture(model_of(written_out=True), X, optimizer="none")
    inference = capture(model_of(written_out=True), X, train=False)
    (finding,) = findings(training, "PRC004")
    assert (finding.module, finding.sites) == ("*.0", 3)
    assert finding.gain_s > findings(inference, "PRC004")[0].gain_s


def test_autocast_itself_is_healthy() -> None:
    assert not findings(capture(LanguageModel(), tokens(), amp="bf16"), "PRC004")


def test_attention_by_hand_is_left_to_its_own_rule() -> None:
    model = Attention(fused=False).bfloat16()
    x = torch.empty(8, 1024, 1024, device="meta", dtype=torch.bfloat16)
    step = capture(model, x, amp="bf16")
    assert findings(step, "NTC002")
    assert not findings(step, "PRC004", min_gain=0)


class WideHead(nn.Module):
    """A model whose last layer leaves autocast."""

    def __init__(self, *, wide: bool) -> None:
        super().__init__()
        self.wide = wide
        self.body = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))
        self.head = nn.Linear(2048, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if not self.wide:
            return self.head(x)
        with torch.autocast("cuda", enabled=False):
            return self.head(x.float())


def test_an_fp32_product_in_a_half_step_is_found() -> None:
    wide = capture(WideHead(wide=True), X, amp="bf16")
    half = capture(WideHead(wide=False), X, amp="bf16")
    (finding,) = findings(wide, "PRC004")
    assert finding.module == "head"
    assert finding.gain_s == pytest.approx(saved_s(wide, half), rel=0.1)
    assert not findings(half, "PRC004", min_gain=0)


class MicroBatches(nn.Module):
    """Four micro-batches under one autocast region, or one region each."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.apart = apart
        self.layer = nn.Linear(4096, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.apart:
            return torch.stack([self.region(part) for part in x]).mean()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return torch.stack([self.layer(part) for part in x]).mean()

    def region(self, part: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.layer(part)


def test_a_region_per_micro_batch_casts_again() -> None:
    x = torch.empty(4, 64, 4096, device="meta")
    (finding,) = findings(capture(MicroBatches(apart=True), x, fused_optimizer=True), "PRC005")
    assert finding.safety == "safe"
    assert finding.message.startswith("6 casts")
    assert not findings(capture(MicroBatches(apart=False), x, fused_optimizer=True), "PRC005", min_gain=0)


@pytest.mark.parametrize("steps", [True, False])
def test_weights_that_an_optimizer_has_changed_are_cast_anew(steps: bool) -> None:
    network = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(3))).to("meta")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def twice(x: torch.Tensor) -> None:
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = network(x).float().mean()
            loss.backward()
            if steps:
                optimizer.step()
                optimizer.zero_grad()

    step = capture(twice, torch.empty(64, 4096, device="meta"))
    assert bool(findings(step, "PRC005", min_gain=0)) is not steps


def test_weights_cast_by_hand_are_cast_once_by_hand() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4096, 4096))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.to(x.dtype) @ self.weight.to(x.dtype)

    x = torch.empty(64, 4096, device="meta", dtype=torch.bfloat16)
    (finding,) = findings(capture(Shared(), x), "PRC005")
    assert "autocast" not in finding.fix


@pytest.mark.parametrize("returned", [True, False])
def test_a_wide_activation_that_the_caller_gets_is_no_detour(returned: bool) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2048, 2048)

        def forward(self, x: torch.Tensor) -> Any:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            out = self.layer(wide.to(x.dtype))
            return (out, wide) if returned else out

    x = torch.empty(16384, 2048, device="meta", dtype=torch.bfloat16)
    step = capture(Norm().bfloat16(), x, train=False)
    assert bool(findings(step, "PRC004", min_gain=0)) is not returned


def test_checkpointed_blocks_cast_again_whatever_regions_there_are() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    x = torch.empty(64, 4096, device="meta")
    assert not findings(capture(Checkpointed(), x, amp="bf16"), "PRC005", min_gain=0)


def test_parts_of_a_packed_weight_are_cast_one_by_one() -> None:
    """Attention across two sequences: the rows of the packed weight that make queries, and the others."""

    class Across(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(1024, 16)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.attention(x, y, y, need_weights=False)[0]

    x, y = torch.empty(8, 2, 1024, device="meta"), torch.empty(16, 2, 1024, device="meta")
    assert not findings(capture(Across(), (x, y), amp="bf16", fused_optimizer=True), "PRC005", min_gain=0)


def test_gradients_of_several_normalizations_are_no_one_kernel() -> None:
    layer = nn.TransformerDecoderLayer(512, 8)
    x, y = torch.empty(128, 64, 512, device="meta"), torch.empty(128, 64, 512, device="meta")
    step = capture(nn.TransformerDecoder(layer, 4), (x, y), amp="fp16")
    found = findings(step, "PRC004", min_gain=0)
    assert all(int(re.search(r"around (\d+) kernels", each.message)[1]) < 10 for each in found)  # type: ignore[index]
