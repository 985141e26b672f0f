"""The programs in ``examples/programs``: each runs as it is."""

from __future__ import annotations

from importlib import util
from pathlib import Path

import pytest

from tilefit.capture.child import capture_program_in_child
from tilefit.options import ProgramOptions

PROGRAMS = Path(__file__).parents[3] / "examples" / "programs"


@pytest.mark.parametrize(
    ("name", "needs", "step", "batch", "fake"),
    [
        ("gan", "torchvision", "a batch of 128, Adam", 128, "torchvision.datasets.CIFAR10"),
        ("speech", "torch", "a batch of 32, AdamW", 32, ""),
        ("trainer", "transformers accelerate", "2 micro-batches of 32, AdamW", 64, "distilbert-base-uncased"),
    ],
)
def test_a_program_runs_without_its_data(name: str, needs: str, step: str, batch: int, fake: str) -> None:
    if not all(map(util.find_spec, needs.split())):
        pytest.skip(f"needs {needs}")
    captured = capture_program_in_child(
        ProgramOptions(program=str(PROGRAMS / f"{name}.py"), fake_data=True), "h200", timeout_s=200
    )
    program = captured.program
    assert program is not None
    assert program.step.startswith(step)
    assert captured.batch == batch
    assert fake in " ".join(program.fake)
    (loader,) = program.loaders
    assert loader.source.startswith((f"examples/programs/{name}.py:", str(PROGRAMS)))
    assert program.events  # at the least, batches go to the GPU
