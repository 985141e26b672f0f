"""BAT: below the knee, beyond the memory."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from builders import StepBuilder, gpt2
from tilefit.gpus import Gpu
from tilefit.ops import Gemm, HostEvent, Memory, Program, Settings, Site, Step
from tilefit.ops.program import TO_GPU
from tilefit.rules import run

GB = 10**9


def small(batch: int, peak_bytes: int = 0, *, training: bool = True) -> Step:
    b = StepBuilder(batch, training=training, settings=Settings(training=training, amp="bf16"))
    for i in range(8):
        b.linear(f"layers.{i}", batch, 4096, 4096)
    return b.step(memory=Memory(parameter_bytes=GB, peak_bytes=peak_bytes))


def advised(fix: str) -> int:
    return next(int(word.strip(".,")) for word in fix.split() if word.strip(".,").isdigit())


def test_the_memory_limits_the_advice(h200: Gpu) -> None:
    # 1 GB fixed and 1 GB a sample: 131 fit in 94 % of 141 GB.
    (finding,) = run(small(16, 17 * GB), h200, select=["BAT"])
    assert 16 < advised(finding.fix) <= 131


def test_fewer_and_larger_micro_batches_only_where_there_are_some(h200: Gpu) -> None:
    alone = small(32, 33 * GB)
    (finding,) = run(alone, h200, select=["BAT"])
    assert "accumulate" not in finding.fix.lower()
    factor = advised(finding.fix) // 32
    assert factor > 1
    fixes = {}
    for parts in (2, 2 * factor, 3 * factor + 1):
        step = replace(alone, batch=32 * parts, program=Program("", "", micro_batches=parts))
        (accumulated,) = run(step, h200, select=["BAT"])
        fixes[parts] = accumulated.fix
    assert fixes[2 * factor].startswith(
        f"Accumulate 2 micro-batches of {32 * factor}, in place of {2 * factor}"
    )
    assert fixes[3 * factor + 1] == (
        f"Use micro-batches of {32 * factor} (fewer updates for as many samples: adapt the learning rate)."
    )
    too_large = replace(small(256, 257 * GB), program=Program("", "", micro_batches=16))
    (error,) = run(too_large, h200, select=["BAT002"])
    assert f"micro-batches of at most {int((0.94 * h200.memory_bytes - GB) / GB) // 16} " in error.fix


def test_copies_of_a_larger_batch_are_in_its_price(h200: Gpu) -> None:
    """What the headline says is what the table of batches says."""
    copy = HostEvent(0, TO_GPU, "to", Site("", "train.py:3"), 200_000)
    step = replace(small(16, 17 * GB), program=Program("", "", events=(copy,)))
    (finding,) = run(step, h200, select=["BAT"])
    times = float(re.findall(r"it would do ([\d.]+) times", finding.message)[0])
    assert 1 / (1 - finding.gain_fraction) == pytest.approx(times, rel=0.01)


def test_beyond_the_knee_it_is_silent(h200: Gpu) -> None:
    assert run(small(8192), h200, select=["BAT"]) == []
    assert run(gpt2(layers=12), h200, select=["BAT"]) == []


def test_a_step_beyond_the_memory_is_an_error_that_names_what_fits(h200: Gpu) -> None:
    (finding,) = run(small(256, 257 * GB), h200, select=["BAT"])
    assert (finding.code, finding.severity) == ("BAT002", "error")
    limit = int((0.94 * h200.memory_bytes - GB) / GB)
    assert f"at most {limit} " in finding.fix
    assert finding.gain_s == 0


def test_parameters_beyond_the_memory_need_more_gpus(h200: Gpu) -> None:
    memory = Memory(parameter_bytes=280 * GB, gradient_bytes=280 * GB, optimizer_bytes=560 * GB)
    step = StepBuilder(4).step(memory=Memory(**{**_fields(memory), "peak_bytes": 1200 * GB}))
    (finding,) = run(step, h200, select=["BAT002"])
    gpus = -(-1120 * GB // int(0.94 * h200.memory_bytes))
    assert f"at least {gpus} GPUs" in finding.fix


def test_a_step_that_fits_is_no_error(h200: Gpu) -> None:
    assert run(small(8192, 100 * GB), h200, select=["BAT002"]) == []


def _fields(memory: Memory) -> dict[str, int]:
    return {name: getattr(memory, name) for name in memory.__slots__}


def test_a_loss_over_all_pairs_of_samples_has_no_knee(h200: Gpu) -> None:
    """Its work grows with the square of the batch."""

    def step(batch: int, others: int) -> Step:
        b = StepBuilder(batch, training=False)
        for i in range(8):
            b.linear(f"layers.{i}", batch, 4096, 4096)
        first, second, pairs = b.tensor(batch, 4096), b.tensor(others, 4096), b.tensor(batch, others)
        b.add(Gemm(batch, others, 4096, dtype="bf16"), "loss", inputs=(first, second), outputs=(pairs,))
        return b.step()

    assert not run(step(64, 64), h200, select=["BAT001"])
    assert run(step(64, 80), h200, select=["BAT001"])


def test_the_largest_batch_looked_at_is_said_where_the_rate_still_rises(h200: Gpu) -> None:
    (finding,) = run(small(1), h200, select=["BAT001"])
    assert "64 times the batch was not looked at" in finding.arithmetic[-1]
    assert "fewer updates" in finding.fix


def test_a_layer_as_wide_as_the_batch_is_no_product_of_samples(h200: Gpu) -> None:
    """The gradient of its weight is as large as the batch on either side."""
    b = StepBuilder(1024, settings=Settings(amp="bf16"))
    for i in range(4):
        b.linear(f"layers.{i}", 1024, 1024, 1024)
    assert run(b.step(memory=Memory(parameter_bytes=GB, peak_bytes=2 * GB)), h200, select=["BAT001"])
