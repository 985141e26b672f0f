"""INT001."""

from __future__ import annotations

import pytest
import torch

from tilefit.capture import capture
from tilefit.cost import estimate_step
from toys import LanguageModel, tokens
from whatif import findings


def test_one_token_at_a_time_reads_weights() -> None:
    with torch.device("meta"):
        model = LanguageModel(width=4096).bfloat16()
    step = capture(model, tokens(1, 4), train=False)
    (finding,) = findings(step, "INT001")
    linear_s = sum(
        estimate.time_s
        for entry, estimate in zip(step.ops, estimate_step(step, "h200").ops, strict=True)
        if entry.op.kind == "gemm"
    )
    assert finding.safety == "throughput"
    assert "on 4 rows, most of it to read weights" in finding.message
    assert "8 samples at once instead of 1" in finding.fix
    # What is gained is the layers' own time, with the launches that go with them.
    assert finding.gain_s > 0
    assert finding.gain_s < 7 / 8 * estimate_step(step, "h200").time_s
    assert linear_s > 0.2 * estimate_step(step, "h200").gpu_time_s


@pytest.mark.parametrize("train", [True, False])
def test_thousands_of_rows_are_healthy(train: bool) -> None:
    assert not findings(capture(LanguageModel(), tokens(), amp="bf16", train=train), "INT001", min_gain=0)
