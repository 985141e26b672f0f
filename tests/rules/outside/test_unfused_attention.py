"""NTC005."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from capturing import captured
from encoders import Encoder
from tilefit.capture import capture
from tilefit.cost.fusion import fuse
from tilefit.ops import Step
from whatif import findings, saved_s


def encoder(mask: str, *, compiled: bool = False, **options: Any) -> Step:
    # So large that the host does not limit the compiled step.
    x = torch.empty(128 if compiled else 32, 512, 512, device="meta")
    step = capture(Encoder(mask), x, amp="bf16", compile=compiled, **options)
    return fuse(step) if compiled else step


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_mask_that_repeats_a_column_costs_what_a_copy_of_it_saves(compiled: bool, train: bool) -> None:
    spread, contiguous = (
        encoder(mask, compiled=compiled, train=train) for mask in ("expanded", "contiguous")
    )
    (finding,) = findings(spread, "NTC005")
    # Uncompiled, the layout copies around the fused kernel's gradients, which it does not need, are left in.
    saved = saved_s(spread, contiguous)
    assert (0.97 if compiled else 0.85) * saved < finding.gain_s < 1.05 * saved
    assert (finding.module, finding.sites, finding.safety) == ("layers.*", 2, "safe")
    assert finding.source.startswith("tests/encoders.py:")
    assert "mask is not contiguous" in finding.message
    assert "mask.contiguous()" in finding.fix


@pytest.mark.parametrize("compiled", [True, False])
def test_no_other_rule_takes_it_for_products_in_fp32_or_attention_by_hand(compiled: bool) -> None:
    step = encoder("expanded", compiled=compiled)
    # Autocast's casts around normalizations are no part of it, and may be worth a little.
    assert all("native_layer_norm" in found.message for found in findings(step, "PRC004", min_gain=0))
    assert not findings(step, "NTC002", min_gain=0)


class Positions(torch.nn.Module):
    """An encoder with a learned bias per head and distance, which it permutes."""

    def __init__(self, *, contiguous: bool) -> None:
        super().__init__()
        self.contiguous = contiguous
        self.bias = torch.nn.Embedding(32, 8)
        self.layers = Encoder("none").layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        mask = self.bias((places[:, None] - places).abs() % 32).permute(2, 0, 1)[None]
        mask = mask.contiguous() if self.contiguous else mask
        for layer in self.layers:
            x = x + layer(x, mask)
        return x


@pytest.mark.parametrize("compiled", [True, False])
def test_what_learns_the_mask_is_not_saved(compiled: bool) -> None:
    x = torch.empty(32, 512, 512, device="meta")
    spread, contiguous = (
        capture(Positions(contiguous=choice), x, amp="bf16", compile=compiled) for choice in (False, True)
    )
    if compiled:
        spread, contiguous = fuse(spread), fuse(contiguous)
    (finding,) = findings(spread, "NTC005")
    saved = saved_s(spread, contiguous)
    assert 0.85 * saved < finding.gain_s < 1.1 * saved


def test_real_data_on_the_cpu_takes_the_path_of_the_gpu() -> None:
    kept = {}
    for device in ("meta", "cpu"):
        x = torch.zeros(2, 32, 64, device=device)
        model = Encoder("expanded", width=64, heads=2, dropout=0.0)
        kept[device] = capture(model, x, amp="bf16", on_cpu=device == "cpu")
    names = [[entry.name for entry in step.ops if entry.site.fallback] for step in kept.values()]
    assert names[0] == names[1] != []


def test_a_mask_that_is_made_under_the_compiler_alone_is_seen_there_alone() -> None:
    assert findings(encoder("compiling", compiled=True), "NTC005")
    assert not findings(encoder("compiling"), "NTC005", min_gain=0)


@pytest.mark.parametrize("mask", ["contiguous", "none"])
@pytest.mark.parametrize("compiled", [True, False])
def test_attention_that_is_fused_is_healthy(mask: str, compiled: bool) -> None:
    assert not findings(encoder(mask, compiled=compiled), "NTC005", min_gain=0)


def attention(*sizes: int, swapped: int = 0, dtype: torch.dtype = torch.bfloat16) -> Step:
    """Attention whose first ``swapped`` operands have their last two dimensions swapped in memory."""
    qkv = [torch.empty(*sizes, dtype=dtype, device="meta", requires_grad=True) for _ in range(3)]

    def call(self: Any, *operands: torch.Tensor) -> torch.Tensor:
        laid = [t.mT.contiguous().mT if i < swapped else t for i, t in enumerate(operands)]
        return F.scaled_dot_product_attention(*laid)

    return captured(call, *qkv)


def test_the_reason_says_what_to_do() -> None:
    (flat,) = findings(attention(256, 512, 64), "NTC005")
    assert "4 dimensions" in flat.message
    assert "unsqueeze(1)" in flat.fix
    (swapped,) = findings(attention(32, 8, 512, 64, swapped=1), "NTC005")
    assert "its query is not contiguous" in swapped.message
    assert "query.contiguous()" in swapped.fix
    assert not findings(attention(32, 8, 512, 64), "NTC005", min_gain=0)


def test_fp64_has_no_fused_kernel_to_be_had() -> None:
    assert not findings(attention(32, 8, 512, 64, swapped=1, dtype=torch.float64), "NTC005", min_gain=0)


def test_checkpointed_attention_is_counted_with_its_second_forward_pass() -> None:
    def step(mask: str) -> Step:
        def call(self: Any, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.model, x, use_reentrant=False)

        x = torch.empty(32, 512, 512, device="meta", requires_grad=True)
        return captured(call, x, parts={"model": Encoder(mask, dropout=0.0)}, amp="bf16")

    spread = step("expanded")
    saved = saved_s(spread, step("contiguous"))
    assert 0.8 * saved < sum(each.gain_s for each in findings(spread, "NTC005")) < 1.02 * saved


def test_a_step_keeps_the_reason_when_it_is_stored() -> None:
    step = encoder("expanded")
    again = Step.from_json(step.to_json())
    assert again == step
    assert findings(again, "NTC005") == findings(step, "NTC005")
