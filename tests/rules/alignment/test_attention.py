"""ALN006: head sizes, and attention written out."""

from __future__ import annotations

import pytest

from builders import StepBuilder
from tilefit.cost import estimate_step
from tilefit.gpus import Gpu
from tilefit.ops import Attention
from tilefit.rules import get, run
from tilefit.rules.base import Context


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
