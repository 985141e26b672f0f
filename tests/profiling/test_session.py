"""Profiling a program: steps, results unchanged, scripts, targets."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import tilefit
from profiled_net import Net, training_step
from tilefit.capture.script import run_script
from tilefit.errors import TilefitError, UsageError
from tilefit.options import TargetOptions
from tilefit.profiling import Profile
from tilefit.profiling.ranges import bare
from tilefit.profiling.target import profile_target


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Net(), torch.nn.Dropout(0.5))
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.usefixtures("pretended")
def test_steps_are_skipped_timed_and_profiled() -> None:
    model, optimizer = made()
    ticks = iter(range(1000))
    run = Profile(steps=2, skip=1, plain=2, gpu="h200", name="mine", clock=lambda: next(ticks) * 1e-3)
    with run:
        for _ in range(7):
            training_step(model, optimizer)
            run.step()
    report = run.report
    assert report.model == "mine"
    assert report.measured is not None
    assert report.measured.steps == 2
    assert report.measured.time_s == pytest.approx(1e-3)
    assert report.measured.overhead is not None
    assert {row.module for row in report.ops if row.kind == "gemm"} == {"0.up", "0.down"}
    assert all(row.source.startswith("tests/") for row in report.ops if row.kind == "gemm")


@pytest.mark.usefixtures("pretended")
def test_a_block_without_steps_is_one_step() -> None:
    model, optimizer = made()
    with tilefit.profile(gpu="h200") as run:
        training_step(model, optimizer)
    measured = run.report.measured
    assert measured is not None
    assert measured.steps == 1
    assert measured.overhead is None
    assert "was not measured" in str(run.report)


@pytest.mark.usefixtures("pretended")
def test_parameters_are_known_by_name() -> None:
    """Rules that need to know a weight from an activation work on a profiled run."""
    model, optimizer = made()
    with tilefit.profile(gpu="h200") as run:
        training_step(model, optimizer)
    assert run.report.step.parameter_count == sum(p.numel() for p in model.parameters())


def test_nothing_that_is_computed_changes() -> None:
    def train(profiled: bool) -> list[float]:
        random.seed(0)
        model, optimizer = made()
        if not profiled:
            return [float(training_step(model, optimizer)) for _ in range(5)] + [random.random()]
        losses = []
        with Profile(steps=2, skip=1, plain=1) as run:
            for _ in range(5):
                losses.append(float(training_step(model, optimizer)))
                run.step()
        return [*losses, random.random()]

    assert train(profiled=True) == train(profiled=False)


def test_hooks_are_gone_afterwards() -> None:
    from torch.nn.modules import module

    before = len(module._global_forward_pre_hooks), len(module._global_forward_hooks)
    model, optimizer = made()

    def fail() -> None:
        with tilefit.profile():
            training_step(model, optimizer)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (len(module._global_forward_pre_hooks), len(module._global_forward_hooks)) == before


def test_a_program_that_ends_too_early_is_told() -> None:
    with Profile(steps=2, skip=5) as run:
        run.step()
    with pytest.raises(TilefitError, match="ended in step 2") as caught:
        _ = run.report
    assert "after 5 steps" in caught.value.hint


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"skip": -1}, {"plain": -1}])
def test_numbers_out_of_range(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        tilefit.profile(**wrong)  # type: ignore[arg-type]


@pytest.mark.usefixtures("pretended")
def test_a_script_is_ended_after_its_profiled_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "model = torch.nn.Linear(64, 30)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for step in range(int(sys.argv[1])):\n"
        "    loss = model(torch.ones(8, 64)).sum()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    print('step', step)\n"
    )
    run = Profile(steps=2, skip=1, plain=1, gpu="h200", optimizer_steps=True)
    assert run_script(script, ["100"], run) is None
    printed = capsys.readouterr()
    assert printed.err.count("step") < 10
    assert not printed.out
    products = [row for row in run.report.ops if row.kind == "gemm"]
    assert [row.phase for row in products] == ["forward", "backward-weight"]


@pytest.mark.usefixtures("pretended")
def test_a_target_s_kernels_belong_to_the_captured_step() -> None:
    model = "tests/profiled_net.py:net"
    options = TargetOptions(optimizer="none")
    run = profile_target(model, options, gpu="h200", steps=2, skip=0, plain=1, device="cpu")
    report = run.report
    measured = report.measured
    assert measured is not None
    assert measured.unmatched_s == 0
    assert measured.attributed_s / measured.kernel_s > 0.9
    assert all(row.measured for row in report.ops if row.module)


def test_without_a_gpu_a_target_is_refused_before_it_is_built() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match="no CUDA GPU"):
        profile_target("no.such:model", TargetOptions())


def test_the_compilers_wrapper_is_not_part_of_a_path() -> None:
    assert bare("_orig_mod.h.0") == "h.0"
    assert bare("encoder._orig_mod") == "encoder"
