"""A step between its captures is the one that a capture there would give."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import StepBuilder, gpt2, resnet
from tilefit.ops import Attention, Gemm, Memory, Step, Streaming
from tilefit.ops.interpolation import interpolate


def attention(seq: int, **options: object) -> Step:
    """Products whose sizes grow with the sequence, and scores that grow with its square."""
    b = StepBuilder(4)
    b.linear("qkv", 4 * seq, 768, 2304)
    q, scores = b.tensor(48, seq, 64), b.tensor(48, seq, seq)
    b.add(Gemm(seq, seq, 64, batch=48), "attn", inputs=(q, q), outputs=(scores,))
    b.add(Streaming("softmax", 48 * seq * seq, 96 * seq * seq, 96 * seq * seq, "bf16", inner=seq), "attn")
    b.add(Attention(4, 12, seq, 64, **options), "attn")  # type: ignore[arg-type]
    return replace(b.step(), memory=Memory(parameter_bytes=10, peak_bytes=10 + 3 * seq + 2 * seq * seq))


@pytest.mark.parametrize("seq", [65, 300, 777, 1024, 2000])
def test_the_step_at_a_length_that_was_not_captured(seq: int) -> None:
    at = interpolate({n: attention(n) for n in (64, 512, 1024)})
    assert at is not None
    expected = attention(seq)
    assert [entry.op for entry in at(seq).ops] == [entry.op for entry in expected.ops]
    shapes = [[ref.shape for ref in (*e.inputs, *e.outputs)] for e in expected.ops]
    assert [[ref.shape for ref in (*e.inputs, *e.outputs)] for e in at(seq).ops] == shapes
    assert at(seq).memory == expected.memory


def test_the_step_at_a_batch_that_was_not_captured() -> None:
    for model in (gpt2, resnet):
        at = interpolate({batch: model(batch=batch) for batch in (2, 16, 48)})
        assert at is not None
        assert at(37).batch == 37
        assert [entry.op for entry in at(37).ops] == [entry.op for entry in model(batch=37).ops]


def test_what_is_replayed_from_a_cuda_graph_is_so_at_every_size() -> None:
    captured = {n: attention(n) for n in (64, 512, 1024)}
    at = interpolate(
        {n: replace(s, ops=tuple(replace(e, replayed=True) for e in s.ops)) for n, s in captured.items()}
    )
    assert at is not None
    assert all(entry.replayed for entry in at(300).ops)


def test_a_capture_is_returned_as_it_is() -> None:
    steps = {n: attention(n) for n in (64, 512, 1024)}
    at = interpolate(steps)
    assert at is not None
    assert at(512) is steps[512]


def test_other_operations_cannot_be_interpolated() -> None:
    b = StepBuilder(4)
    b.linear("qkv", 256, 768, 2304)
    assert interpolate({64: b.step(), 512: attention(512), 1024: attention(1024)}) is None
    masked = attention(64, is_causal=True)
    assert interpolate({64: masked, 512: attention(512), 1024: attention(1024)}) is None


def test_launches_are_those_of_the_nearest_capture_and_no_size_vanishes() -> None:
    def step(size: int, kernels: int) -> Step:
        b = StepBuilder(1)
        b.add(Streaming("copy", size, size, size, kernels=kernels), "m")
        b.add(Gemm(max(1, 10 - size), 8, 8), "m")
        return b.step()

    at = interpolate({1: step(1, 2), 8: step(8, 30), 9: step(9, 30)})
    assert at is not None
    assert [at(size).ops[0].op.kernels for size in (2, 7, 50)] == [2, 30, 30]  # type: ignore[attr-defined]
    assert at(50).ops[1].op.m == 1  # type: ignore[attr-defined]
