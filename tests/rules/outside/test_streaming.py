"""NTC001, NTC003, NTC004: fusing what streams memory."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tilefit import units
from tilefit.capture import capture
from tilefit.cost.fusion import fuse
from tilefit.cost.lowering import PAD
from tilefit.ops import Step, Streaming
from toys import LanguageModel, tokens
from whatif import findings, saved_s


def test_copies_that_pad_are_no_streaming_operations() -> None:
    """Compiled, a model with odd sizes has copies that an eager step has not."""
    streaming = [nn.Tanh(), nn.Sigmoid(), nn.Tanh(), nn.Sigmoid(), nn.Tanh()]
    model = nn.Sequential(nn.Linear(1023, 1023), *streaming, nn.Linear(1023, 1023))
    step = capture(model, torch.empty(65536, 1023, device="meta"), amp="bf16")
    (finding,) = findings(step, "NTC001")
    before, left = map(int, re.findall(r"(\d+) streaming operations .* (\d+) are left", finding.message)[0])
    assert left < before
    fused = fuse(step)
    assert left == sum(isinstance(e.op, Streaming) and e.name != PAD for e in fused.ops)
    assert any(e.name == PAD for e in fused.ops)


class Launches(nn.Module):
    """Odd sizes, which cost the GPU; but the host takes longer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1023, 1023) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)).sigmoid() * 1.5
        return x


def test_where_the_host_takes_longer_what_the_compiler_pads_is_no_saving() -> None:
    assert findings(capture(Launches(), torch.empty(4096, 1023, device="meta"), amp="bf16"), "NTC001")


def test_bare_products_leave_nothing_to_fuse() -> None:
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4))).bfloat16()
    x = torch.empty(16384, 4096, device="meta", dtype=torch.bfloat16)
    assert not findings(capture(model, x, train=False), "NTC001")


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_fused_optimizer_is_worth_what_its_capture_saves(optimizer: str, clip: float | None) -> None:
    more: dict[str, Any] = {"amp": "bf16", "optimizer": optimizer, "clip": clip}
    unfused = capture(LanguageModel(), tokens(), **more)
    fused = capture(LanguageModel(), tokens(), **more, fused_optimizer=True)
    for finding in findings(unfused, "NTC003", min_gain=0):
        assert finding.gain_s == pytest.approx(saved_s(unfused, fused), rel=0.02)
        assert finding.safety == "safe"
    assert bool(findings(unfused, "NTC003")) == (saved_s(unfused, fused) > 0.05e-3)
    assert not findings(fused, "NTC003", min_gain=0)


@pytest.mark.parametrize("clips", ["clip_grad_norm_", "get_total_norm"])
@pytest.mark.parametrize("foreach", [True, False])
def test_what_clips_gradients_is_no_part_of_the_optimizer(clips: str, foreach: bool) -> None:
    def trained(clip: bool) -> list[str]:
        with torch.device("meta"):
            model, x = LanguageModel(), tokens()
        optimizer = torch.optim.AdamW(model.parameters())

        def step(x: torch.Tensor) -> None:
            model(x).backward()
            if clip and clips == "get_total_norm":
                nn.utils.get_total_norm(
                    [p.grad for p in model.parameters() if p.grad is not None], foreach=foreach
                )
            elif clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
            optimizer.step()

        return [finding.message for finding in findings(capture(step, x), "NTC003", min_gain=0)]

    assert trained(clip=True) == trained(clip=False)


def test_without_an_optimizer_there_is_nothing_to_fuse() -> None:
    assert not findings(capture(LanguageModel(), tokens(), optimizer="none"), "NTC003", min_gain=0)
    assert not findings(capture(LanguageModel(), tokens(), train=False), "NTC003", min_gain=0)


def test_wide_logits_cost_their_passes() -> None:
    step = capture(LanguageModel(vocabulary=64000, layers=1), tokens(), amp="bf16")
    (finding,) = findings(step, "NTC004")
    assert finding.module == "head"
    logits = 8 * 1024 * 64000
    # At least the four fp32 and two half passes that go, at the datasheet's 4.8 TB/s.
    assert finding.gain_s > (6 + 8 + 8 + 6 - 6) * logits / 4.8e12


def test_micro_batches_with_wide_logits_are_one_finding() -> None:
    """They are one loss in the program, and one line changes all of them."""

    class Accumulating(LanguageModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.stack([super(Accumulating, self).forward(part) for part in tokens.chunk(4)]).sum()

    step = capture(Accumulating(vocabulary=64000, layers=1), tokens(), amp="bf16")
    (finding,) = findings(step, "NTC004")
    assert finding.message.endswith("in fp32, 4 times")
    (whole,) = findings(capture(LanguageModel(vocabulary=64000, layers=1), tokens(), amp="bf16"), "NTC004")
    assert finding.gain_s == pytest.approx(whole.gain_s, rel=0.1)


@pytest.mark.parametrize("options", [{"train": False}, {}])
def test_half_losses_small_vocabularies_and_inference_are_healthy(options: dict[str, bool]) -> None:
    small = 64000 if options else 4096
    step = capture(LanguageModel(vocabulary=small, layers=1), tokens(), amp="bf16", **options)
    assert not findings(step, "NTC004", min_gain=0)


@pytest.mark.parametrize("channels_last", [True, False])
def test_the_compilers_layout_is_told_of_where_it_is_another(channels_last: bool) -> None:
    """A bias that is added with what follows makes convolutions faster, too: that is no layout."""
    layers = [
        layer
        for _ in range(4)
        for layer in (nn.Conv2d(128, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU())
    ]
    step = capture(
        nn.Sequential(*layers), torch.empty(64, 128, 56, 56), amp="bf16", channels_last=channels_last
    )
    (finding,) = findings(step, "NTC001")
    assert ("layout of convolutions" in finding.arithmetic[0]) != channels_last


def test_what_is_saved_beside_the_layout_is_of_the_gpus_time() -> None:
    """Compiled, the host limits this step: it saves less than the GPU, and most of that by the layout."""
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(128, 128, 3, padding=1), nn.GELU(), nn.Tanh())]
    step = capture(nn.Sequential(*layers), torch.empty(64, 128, 56, 56), amp="bf16")
    (finding,) = findings(step, "NTC001")
    assert finding.gain_s == pytest.approx(saved_s(step, fuse(step)))


def _launched(rows: int, *, compiled: bool = True) -> Step:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512)) for _ in range(12)))
    step = capture(model, torch.empty(rows, 512, device="meta"), amp="bf16", compile=compiled)
    return fuse(step) if compiled else step


def test_where_the_host_limits_compiled_code_graphs_save_its_launches() -> None:
    step = _launched(512)
    (finding,) = findings(step, "NTC006")
    graphed = replace(step, settings=replace(step.settings, cuda_graph=True))
    assert finding.gain_s == pytest.approx(saved_s(step, graphed))
    assert not findings(graphed, "NTC006")
    assert not findings(replace(step, settings=replace(step.settings, split=True)), "NTC006")
    # Not compiled, the advice to compile says the same.
    eager = _launched(512, compiled=False)
    assert not findings(eager, "NTC006")
    (compiling,) = findings(eager, "NTC001")
    assert f"saves {units.seconds(finding.gain_s)} more." in compiling.fix


def test_where_the_gpu_limits_compiled_code_graphs_save_nothing() -> None:
    assert not findings(_launched(262144), "NTC006")
    (compiling,) = findings(_launched(262144, compiled=False), "NTC001")
    assert "CUDA graphs" not in compiling.fix


def test_where_graphs_hold_hardly_anything_they_are_not_spoken_of() -> None:
    step = capture(nn.Linear(1000, 990), torch.empty(4096, 1000), amp="bf16")
    (compiling,) = findings(step, "NTC001")
    assert "CUDA graphs" not in compiling.fix
