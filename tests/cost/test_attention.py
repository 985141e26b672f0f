from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from physics import least_s
from tilefit.cost import estimate
from tilefit.cost.attention import backend
from tilefit.gpus import get
from tilefit.ops import BACKWARD_DATA, FORWARD, Attention


@pytest.mark.parametrize(
    ("gpu", "changes", "expected"),
    [
        ("h200", {}, "cudnn"),
        ("h200", {"mask_bytes": 1 << 20}, "cudnn"),
        ("h200", {"head_dim": 80}, "cudnn"),
        ("h200", {"head_dim": 36}, "flash"),
        ("h200", {"dtype": "fp32"}, "efficient"),
        ("h200", {"dtype": "fp64"}, "math"),
        ("a100", {}, "flash"),
        ("a100", {"mask_bytes": 1 << 20}, "efficient"),
        ("a100", {"head_dim": 512}, "efficient"),
        ("t4", {"dtype": "fp16"}, "efficient"),
        ("t4", {"dtype": "bf16"}, "math"),
    ],
)
def test_the_backend_pytorch_chooses(gpu: str, changes: dict[str, object], expected: str) -> None:
    arguments = {"batch": 4, "num_heads": 16, "seq_len": 1024, "head_dim": 128} | changes
    op = Attention(**arguments)  # type: ignore[arg-type]
    assert backend(op, get(gpu))[0] == expected
    assert estimate(op, gpu).kernel_family == expected


def test_the_reason_names_what_keeps_attention_from_the_fast_path() -> None:
    masked = estimate(Attention(4, 16, 1024, 128, mask_bytes=1 << 20), "a100")
    assert "explicit mask" in masked.reason
    assert masked.time_s > 1.5 * estimate(Attention(4, 16, 1024, 128), "a100").time_s


def test_the_math_backend_pays_for_the_scores_in_memory() -> None:
    fused = estimate(Attention(4, 16, 4096, 128, dtype="fp16"), "t4").time_s
    assert estimate(Attention(4, 16, 4096, 128, dtype="bf16"), "t4").time_s > 3 * fused


def test_a_head_of_80_costs_nearly_one_of_96() -> None:
    def time_s(head_dim: int) -> float:
        return estimate(Attention(8, 16, 4096, head_dim, is_causal=True), "h200").time_s

    assert time_s(80) == pytest.approx(time_s(96), rel=0.05)
    assert time_s(64) < time_s(80)


@given(
    st.builds(
        Attention,
        batch=st.integers(1, 32),
        num_heads=st.sampled_from([1, 8, 16, 40]),
        seq_len=st.integers(1, 8192),
        head_dim=st.integers(8, 256),
        is_causal=st.booleans(),
        dtype=st.sampled_from(["bf16", "fp16", "fp32"]),
        direction=st.sampled_from([FORWARD, BACKWARD_DATA]),
    ),
    st.sampled_from(["t4", "a100", "h200", "b200"]),
)
def test_nothing_beats_the_published_peak_and_bandwidth(op: Attention, gpu: str) -> None:
    predicted = estimate(op, gpu)
    assert least_s(op, gpu) <= predicted.low_s <= predicted.time_s <= predicted.high_s


def test_backward_takes_two_to_four_times_the_forward_pass() -> None:
    forward = estimate(Attention(4, 16, 4096, 128), "a100").time_s
    backward = estimate(Attention(4, 16, 4096, 128, direction=BACKWARD_DATA), "a100").time_s
    assert 2 < backward / forward < 4
