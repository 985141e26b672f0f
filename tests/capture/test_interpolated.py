"""How many captures a curve takes, and what becomes of those that fail."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from builders import StepBuilder, gpt2
from tilefit.capture.child import capture_target
from tilefit.capture.interpolated import MOST_CAPTURES, StepsBySize, capture_sizes
from tilefit.errors import CaptureError, TargetError, TilefitError
from tilefit.ops import Step
from tilefit.ops.timeline import Timeline
from tilefit.options import TargetOptions

SIZES = tuple(range(1, 65))


class Fake:
    """Captures of hand-made steps; remembers what was asked for."""

    def __init__(self, step_of) -> None:  # type: ignore[no-untyped-def]
        self.step_of = step_of
        self.asked: list[TargetOptions] = []

    def __call__(
        self, target: str, options: Sequence[TargetOptions], timeout_s: float
    ) -> Generator[Step | TilefitError]:
        for each in options:
            self.asked.append(each)
            try:
                yield self.step_of(each)
            except TilefitError as error:
                yield error


def run(fake: Fake, over: str = "batch", sizes: Sequence[int] = SIZES) -> StepsBySize:
    return capture_sizes("model", TargetOptions(), over, sizes, 1.0, capture=fake)


def step_without_batch_one(options: TargetOptions) -> Step:
    """With one sample a copy is spared."""
    assert options.batch
    b = StepBuilder(options.batch)
    x = b.linear("fc", 8 * options.batch, 64, 64)
    if options.batch > 1:
        b.stream("fc", "copy", (x,), (x,))
    return b.step()


def test_four_captures_and_the_size_of_one_know_every_batch() -> None:
    fake = Fake(step_without_batch_one)
    found = run(fake)
    assert sorted(each.batch or 0 for each in fake.asked) == [1, 2, 33, 35, 64]
    assert found.everywhere
    assert found.sizes == SIZES
    for size in (1, 2, 50, 100):
        assert found.at(size) == step_without_batch_one(TargetOptions(batch=size))


def test_a_step_that_jumps_is_captured_at_every_size() -> None:
    def step_of(options: TargetOptions) -> Step:
        b = StepBuilder(options.batch or 0)
        for _ in range(options.batch or 0):
            b.linear("fc", 8, 64, 64)
        return b.step()

    found = run(Fake(step_of), sizes=range(1, 21))
    assert not found.everywhere
    assert found.sizes == tuple(range(1, 21))
    assert len(found.at(7).ops) == 21


def test_a_step_that_is_no_polynomial_is_noticed() -> None:
    def step_of(options: TargetOptions) -> Step:
        b = StepBuilder(options.batch or 0)
        b.linear("fc", 64 * -(-(options.batch or 0) // 64), 64, 64)  # padded by the model itself
        return b.step()

    found = run(Fake(step_of), sizes=range(1, 300))
    assert not found.everywhere
    assert len(found.sizes) <= MOST_CAPTURES + 5
    assert "of 299 sizes were captured" in found.notes[0]


def test_sizes_of_the_model_are_captured_one_by_one_and_refused_ones_left_out() -> None:
    def step_of(options: TargetOptions) -> Step:
        width = options.arguments["hidden"]
        if width % 12:
            raise CaptureError("heads do not divide it")
        return gpt2(batch=2) if width == 96 else StepBuilder(2).step()

    fake = Fake(step_of)
    found = run(fake, "hidden", range(84, 101, 4))
    assert [dict(each.arguments) for each in fake.asked] == [{"hidden": n} for n in range(84, 101, 4)]
    assert found.sizes == (84, 96)
    assert {size: str(error) for size, error in found.failed.items()} == dict.fromkeys(
        (88, 92, 100), "heads do not divide it"
    )


def test_given_inputs_are_scaled_in_their_batch_and_in_nothing_else() -> None:
    found = run(Fake(lambda options: gpt2(batch=16)))
    assert [entry.op for entry in found.at(4).ops] == [entry.op for entry in gpt2(batch=4).ops]
    assert "captured with 16 samples and scaled" in found.notes[0]
    with pytest.raises(TargetError, match="model does not depend on seq") as refused:
        run(Fake(lambda options: gpt2(batch=16)), "seq")
    assert "a size of the model itself" in refused.value.hint


def test_nothing_captured_is_the_first_error() -> None:
    def step_of(options: TargetOptions) -> Step:
        raise CaptureError("no such model")

    with pytest.raises(CaptureError, match="no such model"):
        run(Fake(step_of))


def test_interrupting_keeps_what_is_done() -> None:
    def step_of(options: TargetOptions) -> Step:
        if options.arguments["hidden"] == 32:
            raise KeyboardInterrupt
        return gpt2(batch=options.arguments["hidden"])

    found = run(Fake(step_of), "hidden", (8, 16, 24, 32, 40))
    assert found.interrupted
    assert found.sizes == (8, 16, 24)
    with pytest.raises(KeyboardInterrupt):
        run(Fake(step_of), "hidden", (32, 40))


def test_compiled_steps_are_fused_at_every_size() -> None:
    def step_of(options: TargetOptions) -> Step:
        step = gpt2(batch=options.batch or 0)
        return replace(step, settings=replace(step.settings, compiled=True))

    found = run(Fake(step_of))
    assert len(found.at(5).ops) < len(gpt2(batch=5).ops)


def test_a_real_model_is_what_a_capture_gives(tmp_path: Path) -> None:
    path = tmp_path / "net_of_sweep.py"
    path.write_text(
        "from torch import nn\n"
        "def words(vocab_size=100, layers=1):\n"
        "    return nn.Sequential(nn.Embedding(vocab_size, 16), nn.Linear(16, vocab_size))\n",
        encoding="utf-8",
    )
    target, options = f"{path}:words", TargetOptions(batch=4, seq=8, amp="bf16")

    def here(
        target: str, options: Sequence[TargetOptions], timeout_s: float
    ) -> Generator[Step | TilefitError]:
        yield from (capture_target(target, each) for each in options)

    found = capture_sizes(target, options, "vocab", range(90, 130), 60.0, capture=here)
    assert found.everywhere
    expected = capture_target(target, TargetOptions(batch=4, seq=8, amp="bf16", arguments={"vocab": 101}))
    assert [entry.op for entry in found.at(101).ops] == [entry.op for entry in expected.ops]
    assert found.at(101).memory == replace(expected.memory, moments=(), timeline=Timeline())
