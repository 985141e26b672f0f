"""Programs that train by replaying CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilefit.capture.child import capture_program_in_child
from tilefit.cost import estimate_step
from tilefit.cost.priced import resolve
from tilefit.ops import OPTIMIZER, Step
from tilefit.ops.program import TO_GPU, WAIT
from tilefit.options import ProgramOptions

_MAKE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 8)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = torch.randn(16, 64, device="cuda"), torch.randn(16, 8, device="cuda")

def forward_and_backward():
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    return loss

def warm_up(steps):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            forward_and_backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
"""
_WHOLE = """
warm_up(WARM)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = forward_and_backward()
    optimizer.step()
for _ in range(10):
    x.copy_(torch.randn(16, 64))
    graph.replay()
    print(loss.item())
"""
_PART = """
warm_up(WARM)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = forward_and_backward()
for _ in range(10):
    x.copy_(torch.randn(16, 64))
    graph.replay()
    optimizer.step()
    print(loss.item())
"""
_EAGER = """
for _ in range(10):
    x.copy_(torch.randn(16, 64))
    loss = forward_and_backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""


def _run(folder: Path, text: str) -> Step:
    path = folder / "train.py"
    path.write_text(text)
    return capture_program_in_child(ProgramOptions(str(path)), "h100-sxm", 100)


@pytest.mark.parametrize(("steps", "stream"), [(1, "side"), (3, "side"), (11, "side"), (3, "None")])
@pytest.mark.parametrize("body", [_WHOLE, _PART])
def test_the_step_is_of_replays_not_of_the_warm_up(
    body: str, steps: int, stream: str, tmp_path: Path
) -> None:
    """Also of one on the program's own stream, as ``None`` says."""
    made = _MAKE.replace("cuda.stream(side)", f"cuda.stream({stream})")
    step = _run(tmp_path, made + body.replace("WARM", str(steps)))

    assert step.program is not None
    assert step.program.step == "a batch of 16, SGD, bf16 autocast, CUDA graphs"
    assert (step.batch, step.settings.amp, step.settings.optimizer) == (16, "bf16", "sgd")
    assert sorted(event.kind for event in step.program.events) == [TO_GPU, WAIT]
    products = [entry for entry in step.ops if entry.op.multiplies]
    assert [entry.op.flop for entry in products].count(2 * 16 * 256 * 64) == 2  # no gradient of the data
    assert len(products) == 5
    assert all(entry.replayed for entry in products)
    assert all(entry.replayed == (body is _WHOLE) for entry in step.ops if entry.phase == OPTIMIZER)


def test_a_replay_launches_and_holds_what_it_captured(tmp_path: Path) -> None:
    whole, part, eager = (
        _run(tmp_path, _MAKE + body.replace("WARM", "3")) for body in (_WHOLE, _PART, _EAGER)
    )

    (gpu,) = resolve("h100-sxm")
    hosts = [estimate_step(each, gpu).host_time_s for each in (whole, part, eager)]
    assert hosts[0] < 0.5 * hosts[2]
    assert hosts[0] < hosts[1] < hosts[2]
    # Gradients stay where the graph has them, and are counted beside the activations that lie there before.
    gradients = whole.memory.gradient_bytes
    assert 0 <= whole.memory.peak_bytes - eager.memory.peak_bytes <= gradients
    assert whole.memory.saved_bytes > 0
    assert Step.from_json(whole.to_json()).ops == whole.ops


def test_graphed_callables_are_replayed_with_their_backward_passes(tmp_path: Path) -> None:
    step = _run(tmp_path, _MAKE + "net = torch.cuda.make_graphed_callables(net, (x,))\n" + _EAGER)

    assert [entry.name for entry in step.ops if entry.op.multiplies and not entry.replayed] == []
    assert {entry.replayed for entry in step.ops if "mse_loss" in entry.name} == {False}
    assert {entry.replayed for entry in step.ops if entry.phase == OPTIMIZER} == {False}


def test_who_trains_on_a_stream_of_its_own_and_captures_nothing_has_its_step(tmp_path: Path) -> None:
    step = _run(tmp_path, _MAKE + "warm_up(5)\n")

    assert step.program is not None
    assert step.program.step == "a batch of 16, SGD, bf16 autocast"
    assert not any(entry.replayed for entry in step.ops)
