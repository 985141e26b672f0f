"""Programs as targets of the commands that take models."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tilefit.capture import child
from tilefit.capture.interpolated import capture_sizes
from tilefit.capture.run import capture
from tilefit.cost.priced import resolve
from tilefit.errors import TilefitError, UsageError
from tilefit.ops import Site, Step
from tilefit.ops.program import TO_GPU, Exchange, HostEvent, Program
from tilefit.options import ProgramOptions, TargetOptions
from tilefit.session.planning import Cluster, PlanSession
from tilefit.sweep.axes import Axis
from tilefit.sweep.run import Grid, Predictions

PROGRAM = """
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
options = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(256, 256) for _ in range(4)), nn.Linear(256, 10)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(5):
    x, y = torch.randn(options.batch_size, 256).cuda(), torch.zeros(options.batch_size).long().cuda()
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(PROGRAM)
    return "train.py"


def test_a_layer_of_a_program_is_explained_with_its_own_arguments(tilefit, program: str) -> None:
    ran = tilefit("explain", program, "layers.1", "--gpu", "h200", "--", "--batch-size", "640")
    assert ran.code == 0, ran.err
    assert "layers.1 in train.py · training step" in ran.out
    assert "640" in ran.out


def test_what_a_program_trains_is_planned_with_its_batch(tilefit, program: str) -> None:
    command = ("plan", program, "--gpus", "4", "--output-format", "json", "--store", "s.db", "--skip", "1")
    ran = tilefit(*command, "--", "--batch-size", "48")
    assert ran.code == 0, ran.err
    data = json.loads(ran.out)
    assert data["global_batch"] == 48
    assert any("--batch-size 48 ran on one GPU (a batch of 48, AdamW)" in note for note in data["notes"])


def test_a_batch_of_a_replica_is_one_gpus(tilefit, tmp_path: Path) -> None:
    (tmp_path / "replica.py").write_text("""
import torch
from torch import nn
torch.distributed.init_process_group("nccl", init_method="tcp://localhost:29511", rank=0, world_size=1)
net = nn.ModuleDict({"layers": nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))})
net.forward = net["layers"].forward
net = nn.parallel.DistributedDataParallel(net.cuda())
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(4):
    net(torch.randn(48, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""")
    ran = tilefit(
        "plan", str(tmp_path / "replica.py"), "--gpus", "4", "--output-format", "json", "--skip", "1"
    )
    assert ran.code == 0, ran.err
    data = json.loads(ran.out)
    assert data["global_batch"] == 4 * 48
    assert any("DistributedDataParallel" in note for note in data["notes"])


def _step(samples: int, copied: int = 0) -> Step:
    """As a program that copies its samples to the GPU makes it."""
    net = nn.ModuleDict({"layers": nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))})
    net.forward = net["layers"].forward
    step = capture(net, torch.empty(samples, 64, device="meta"), options=TargetOptions())
    event = HostEvent(0, TO_GPU, "to", Site("", "train.py:3"), copied or 4 * 64 * samples)
    return replace(step, program=Program("train.py", "", events=(event,), optimizers=("train.py:2",)))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """The arguments of the programs that were run, in place of which steps of the last of them are given."""
    (tmp_path / "train.py").touch()
    ran: list[tuple[str, ...]] = []

    def run(program: ProgramOptions, gpu: str, *_: object) -> Step:
        ran.append(program.command)
        return _step(int(program.command[-1]) if program.command else 32)

    monkeypatch.setattr(child, "capture_program_in_child", run)
    return ran


def test_a_program_is_run_with_few_sizes_and_known_between_them(runs: list[tuple[str, ...]]) -> None:
    options = ProgramOptions("train.py", ("--bs", "{batch}"))
    steps = capture_sizes("train.py", options, "batch", range(8, 65), 1.0)
    assert len(runs) == 4
    for size in (8, 23, 50):
        wanted = _step(size)
        found = steps.at(size)
        assert [entry.op for entry in found.ops] == [entry.op for entry in wanted.ops]
        assert found.program is not None
        assert found.program.events[0].bytes == 4 * 64 * size
    assert not steps.notes


def test_a_batch_that_a_program_is_not_told_is_scaled_and_said(runs: list[tuple[str, ...]]) -> None:
    steps = capture_sizes("train.py", ProgramOptions("train.py"), "batch", range(8, 65), 1.0)
    assert runs == [()]
    assert steps.at(64).batch == 64
    assert "32 samples was scaled" in steps.notes[0]
    assert "{batch}" in steps.notes[0]


def test_an_argument_that_changes_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "capture_program_in_child", lambda *_: _step(32))
    options = ProgramOptions("train.py", ("--bs", "{batch}"))
    with pytest.raises(TilefitError, match=r"is the same whatever \{batch\}"):
        capture_sizes("train.py", options, "batch", range(8, 65), 1.0)


def test_programs_that_copy_otherwise_are_not_interpolated(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def run(program: ProgramOptions, *_: object) -> Step:
        size = int(program.command[-1])
        ran.append(size)
        step = _step(size)
        assert step.program is not None
        events = step.program.events * (1 + size // 40)
        return replace(step, program=replace(step.program, events=events))

    monkeypatch.setattr(child, "capture_program_in_child", run)
    options = ProgramOptions("train.py", ("--bs", "{batch}"))
    steps = capture_sizes("train.py", options, "batch", range(32, 48), 1.0)
    assert sorted(ran) == [*range(32, 48)]
    assert [len(steps.at(size).program.events) for size in (39, 40)] == [1, 2]


def test_a_batch_that_is_not_told_varies_beside_a_length_that_is(runs: list[tuple[str, ...]]) -> None:
    gpus = tuple(resolve(["h200"], None))
    axes = Axis("batch", (16, 32)), Axis("seq", (16, 32, 64))
    grid = Grid("train.py", ProgramOptions("train.py", ("--n", "{seq}")), axes, gpus)
    points = [*Predictions(grid, 1.0)]
    assert {(each.at["batch"], each.samples) for each in points} == {(16, 16), (32, 32)}
    assert len(points) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("curve", "train.py", "--hidden", "64:256:64"), "do not say where hidden goes"),
        (("curve", "train.py", "--batch", "1:8", "--seq", "4"), "do not say where seq goes"),
        (("curve", "train.py", "--batch", "1:8", "--amp", "bf16"), "--amp has no effect"),
        (("curve", "trian.py", "--batch", "1:8"), "Did you mean train.py?"),
        (("sweep", "train.py", "--over", "amp=bf16,off"), "--over amp has no effect"),
        (("sweep", "train.py", "--over", "layers=1,2"), "do not say where layers goes"),
        (("sweep", "train.py", "--over", "batch=1,2", "--measure"), "--measure has no effect"),
        (("plan", "train.py", "--set", "layers=2"), "do not say where layers goes"),
        (("plan", "train.py", "--ranks", "2"), "No such option: --ranks"),
        (("check", "train.py", "--bs", "2"), "stand behind --: tilefit check train.py -- --bs"),
        (("explain", "hf:gpt2", "lm_head", "more"), "unexpected argument 'more'"),
        (("explain", "hf:gpt2", "--skip", "3"), "--skip has no effect"),
    ],
)
def test_what_has_no_effect_is_refused(
    tilefit, runs: list[tuple[str, ...]], arguments: tuple[str, ...], message: str
) -> None:
    ran = tilefit(*arguments)
    assert ran.code == 2
    assert message in ran.err
    assert not runs


def test_sizes_reach_the_arguments_of_a_program(tilefit, runs: list[tuple[str, ...]]) -> None:
    command = ("curve", "train.py", "--batch", "4:8:4", "--seq", "7", "--gpu", "h200")
    ran = tilefit(*command, "--", "--length", "{seq}", "--json", "{}", "--bs", "{batch}")
    assert ran.code == 0, ran.err
    assert runs == [("--length", "7", "--json", "{}", "--bs", size) for size in ("4", "8")]
    # A model's options name sizes, and so they do a program's.
    runs.clear()
    over = ("--over", "gpu=h200,l4", "--store", "s.db")
    assert tilefit("sweep", "train.py", "--batch", "16", *over, "--", "--bs", "{batch}").code == 0
    assert runs == [("--bs", "16")]


def test_a_module_is_a_program_as_well(tilefit, runs: list[tuple[str, ...]]) -> None:
    assert tilefit("curve", "-m", "train", "--batch", "4:8:4", "--gpu", "h200").code == 0
    assert runs == [()]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"updates": False}, "trains nothing"),
        ({"optimizers": ()}, "changes its parameters without an optimizer"),
        ({"optimizers": ("train.py:2", "train.py:3")}, "has several optimizers"),
        ({"ranks": 2}, "is one of 2 ranks"),
        ({"exchanges": (Exchange(0, "all_reduce", "all-reduce", 4, 1, 1, Site()),)}, "is one of 1 ranks"),
        ({"micro_batches": 4}, "of 4 micro-batches"),
    ],
)
def test_what_no_rank_of_a_plan_would_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, object], why: str
) -> None:
    from tilefit.cost.links import network
    from tilefit.session import planning

    def captured(*_: object, **__: object) -> Step:
        step = _step(32)
        assert step.program is not None
        return replace(step, program=replace(step.program, **changed))

    monkeypatch.setattr(planning, "capture_in_child", captured)
    cluster = Cluster(2, 0, network("efa"), {})
    session = PlanSession("train.py", ProgramOptions("train.py"), resolve(["h200"], None), cluster)
    with pytest.raises(UsageError, match=why):
        session.plan()


def test_several_programs_share_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(program: ProgramOptions, *_: object) -> Step:
        if program.command == ("1",):
            raise TilefitError("no such size")
        return _step(2)

    monkeypatch.setattr(child, "capture_program_in_child", run)
    options: Sequence[ProgramOptions] = [ProgramOptions("train.py", (each,)) for each in "12"]
    captured: Generator[Step | TilefitError] = child.captures_in_child("train.py", options)
    failed, step = captured
    assert isinstance(failed, TilefitError)
    assert isinstance(step, Step)
