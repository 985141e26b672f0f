"""A step on another batch is what the same model would give on that batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import StepBuilder, gpt2, resnet
from tilefit.capture import capture
from tilefit.cost import fuse
from tilefit.errors import UsageError
from tilefit.ops import Gemm, Memory, Step, Streaming
from tilefit.ops.scaling import scale_batch
from toys import LanguageModel, tokens


def scaled_ops(step: Step, factor: float) -> list[object]:
    return [entry.op for entry in scale_batch(step, factor).ops]


@pytest.mark.parametrize("factor", [2, 0.5])
def test_gpt2(factor: float) -> None:
    step, expected = gpt2(batch=16), gpt2(batch=round(16 * factor))
    assert scaled_ops(step, factor) == [entry.op for entry in expected.ops]


def test_resnet() -> None:
    assert scaled_ops(resnet(batch=256), 0.25) == [entry.op for entry in resnet(batch=64).ops]


def test_recurrent_and_batched_products() -> None:
    def build(batch: int) -> Step:
        b = StepBuilder(batch)
        b.recurrent("lstm", "LSTM", 512, 512, 100)
        q, s = b.tensor(batch * 12, 128, 64), b.tensor(batch * 12, 128, 128)
        b.add(Gemm(128, 128, 64, batch=batch * 12), "attn", inputs=(q, q), outputs=(s,))
        return b.step()

    assert scaled_ops(build(8), 3) == [entry.op for entry in build(24).ops]


def test_gradients_of_parameters_stay() -> None:
    """The cast of a weight gradient to fp32 moves the same bytes whatever the batch."""
    b = StepBuilder()
    b.linear("fc", 1024, 512, 256)
    step = b.step()
    gradient = next(entry for entry in step.ops if entry.phase == "backward-weight").outputs[0]
    wide = b.tensor(256, 512, dtype="fp32")
    b.backward.clear()
    b.stream("fc", "copy", (gradient,), (wide,), phase="backward-weight", name="aten._to_copy")
    step = replace(step, ops=step.ops + b.step().ops[-1:])
    assert scale_batch(step, 4).ops[-1].op == step.ops[-1].op


def test_what_is_replayed_from_a_cuda_graph_or_runs_beside_compiled_code_does_so_on_any_batch() -> None:
    b = StepBuilder(8)
    b.linear("fc", 1024, 512, 256)
    ops = tuple(replace(entry, replayed=True, eager=True, recomputed=True) for entry in b.step().ops)
    for entry in scale_batch(replace(b.step(), ops=ops), 2).ops:
        assert (entry.replayed, entry.eager, entry.recomputed) == (True, True, True)


@pytest.mark.parametrize("factor", [4, 0.25])
def test_a_scaled_step_is_compiled_like_a_captured_one(factor: float) -> None:
    def compiled(step: Step) -> tuple[int, int]:
        fused = fuse(step)
        return sum(entry.op.moved_bytes for entry in fused.ops), fused.memory.activation_bytes

    def captured(batch: int) -> Step:
        return capture(LanguageModel(), tokens(batch), amp="bf16")

    batch = round(8 * factor)
    moved, held = compiled(scale_batch(captured(8), factor))
    real_moved, real_held = compiled(captured(batch))
    assert moved == pytest.approx(real_moved, rel=0.01)
    assert held == pytest.approx(real_held, rel=0.02)


def test_memory_inputs_and_batch() -> None:
    step = gpt2(batch=16)
    step = replace(step, memory=Memory(parameter_bytes=100, saved_bytes=40, peak_bytes=160))
    scaled = scale_batch(step, 2)
    assert (scaled.memory.saved_bytes, scaled.memory.peak_bytes) == (80, 220)
    assert scaled.memory.parameter_bytes == 100
    assert scaled.batch == 32
    assert scaled.inputs == ("input_ids: int64[32,1024]",)


@pytest.mark.parametrize("factor", [0, -1])
def test_nonsense_is_refused(factor: float) -> None:
    with pytest.raises(UsageError):
        scale_batch(gpt2(), factor)


def test_statistics_over_the_batch_are_of_more_elements() -> None:
    """One block normalises a channel in NCHW: twice the images take it twice as long."""
    images = Streaming(
        "normalization",
        64 * 56 * 56 * 128,
        10**8,
        10**8,
        "bf16",
        inner=56 * 56 * 128,
        function="native_batch_norm",
    )
    rows = Streaming(
        "normalization", 4096 * 768, 10**7, 10**7, "bf16", inner=768, function="native_layer_norm"
    )
    total = Streaming("reduction", 10**6, 2 * 10**6, 4, "bf16", inner=10**6, function="sum")
    b = StepBuilder(128)
    x, y, loss = b.tensor(128, 64, 56, 56), b.tensor(128, 64, 56, 56), b.tensor()
    b.add(images, "bn", inputs=(x,), outputs=(y,))
    b.add(rows, "ln", inputs=(x,), outputs=(y,))
    b.add(total, "loss", inputs=(x,), outputs=(loss,))
    twice = [op.inner for op in scaled_ops(b.step(), 2)]  # type: ignore[attr-defined]
    assert twice == [2 * images.inner, rows.inner, 2 * total.inner]
