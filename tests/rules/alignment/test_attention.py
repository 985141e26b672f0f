"""ALN006: head sizes, and attention written out."""

from __future__ import annotations

import pytest

from builders import StepBuilder
from tilefit.cost import estimate_step
from tilefit.gpus import Gpu
from tilefit.ops import Attention, Gemm, Step
from tilefit.rules import get, run
from tilefit.rules.base import Context


def written_out(positions: int, head_dim: int = 64) -> Step:
    b = StepBuilder(batch=64)
    for layer in range(2):
        module = f"blocks.{layer}.attn"
        batch = 64 * 12
        q, scores = b.tensor(batch, positions, head_dim), b.tensor(batch, positions, positions)
        product = Gemm(positions, positions, head_dim, layout="TN", batch=batch)
        b.add(product, module, inputs=(q, q), outputs=(scores,))
        b.stream(module, "softmax", (scores,), (scores,), inner=positions)
        product = Gemm(positions, head_dim, positions, layout="NN", batch=batch)
        b.add(product, module, inputs=(scores, q), outputs=(q,))
    return b.step()


def test_scores_over_an_odd_number_of_positions(h200: Gpu) -> None:
    (finding,) = run(written_out(577), h200, select=["ALN"])
    assert (finding.code, finding.module, finding.sites) == ("ALN006", "blocks.*.attn", 2)
    assert "scaled_dot_product_attention" in finding.fix
    assert "pad 577" in finding.fix


def test_aligned_positions_are_left_alone(h200: Gpu) -> None:
    assert run(written_out(576), h200, select=["ALN"]) == []


@pytest.mark.parametrize(("heads", "head_dim"), [(12, 64), (16, 128)])
def test_head_sizes_the_kernels_are_made_for(heads: int, head_dim: int, h200: Gpu) -> None:
    b = StepBuilder(batch=16)
    b.attention("attn", heads, 2048, head_dim)
    assert run(b.step(), h200, select=["ALN"]) == []


def test_other_heads_keep_the_width(h200: Gpu) -> None:
    b = StepBuilder(batch=16)
    b.attention("attn", 32, 4096, 80)
    step = b.step()
    (proposal,) = get("ALN006").check(Context(step, h200, estimate_step(step, h200)))
    assert proposal.safety == "unsafe"
    assert proposal.change is not None
    for (entry,) in proposal.change.replace.values():
        assert isinstance(entry.op, Attention)
        assert entry.op.num_heads * entry.op.head_dim == 2560
        assert entry.op.head_dim in (64, 128)
