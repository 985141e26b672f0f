"""Programs that train nothing: their step is a call of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilefit.assessment import Assessment
from tilefit.capture.child import capture_program_in_child
from tilefit.cost.priced import resolve
from tilefit.errors import TilefitError
from tilefit.ops import Step
from tilefit.ops.program import TO_GPU, WAIT
from tilefit.options import ProgramOptions
from tilefit.report.program import headline

_EVALUATION = """
import torch
from torch.utils.data import DataLoader, TensorDataset
net = torch.nn.Sequential(torch.nn.Linear(256, 999), torch.nn.ReLU(), torch.nn.Linear(999, 9)).cuda().eval()
right = 0
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
    for x, y in DataLoader(TensorDataset(torch.randn(1000, 256), torch.zeros(1000)), 64):
        right += (net(x.cuda()).argmax(1) == y.cuda()).sum().item()
"""

_CACHED = """
import torch
from torch import nn
from torch.nn import functional as F

class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.mix = nn.Embedding(1000, 64), nn.Linear(64, 192)
        self.out = nn.Linear(64, 1000)
    def forward(self, ids, cache=None):
        q, k, v = self.mix(self.words(ids)).chunk(3, -1)
        if cache is not None:
            k, v = (torch.cat(both, 1) for both in zip(cache, (k, v)))
        mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=cache is None)
        return self.out(mixed[:, 0]), (k, v)

model = Language().to("cuda", torch.bfloat16)
ids = torch.randint(1000, (8, 512)).cuda()
with torch.no_grad():
    scores, cache = model(ids)
    for _ in range(30):
        ids = scores[:, -1:].argmax(-1)
        scores, cache = model(ids, cache)
"""


def _run(folder: Path, text: str, *arguments: str, **options: int) -> Step:
    path = folder / "serve.py"
    path.write_text(text)
    return capture_program_in_child(ProgramOptions(str(path), arguments, **options), "h100-sxm", 100)


def _said(step: Step) -> dict[str, str]:
    (gpu,) = resolve("h100-sxm")
    around = Assessment(step, gpu).report.program
    assert around is not None
    return dict(headline(around))


def test_an_evaluation_steps_from_batch_to_batch(tmp_path: Path) -> None:
    step = _run(tmp_path, _EVALUATION)

    assert step.program is not None
    assert step.program.step == "a call of Sequential, a batch of 64, bf16 autocast"
    assert (step.settings.training, step.settings.amp, step.batch) == (False, "bf16", 64)
    assert step.inputs == ("input: float32[64,256]",)
    assert sum(entry.op.multiplies for entry in step.ops) == 2
    # This batch's labels, its result, and the next one's samples.
    assert [event.kind for event in step.program.events] == [TO_GPU, WAIT, TO_GPU]
    (loader,) = step.program.loaders
    assert (loader.batch, loader.drawn) == (64, 1)
    assert _said(step)["Serves"].endswith("samples/s")


def test_a_model_that_is_called_once_is_a_step(tmp_path: Path) -> None:
    text = (
        "import torch\nnet = torch.nn.Linear(500, 300).cuda()\nprint(net(torch.rand(7, 500).cuda()).cpu())\n"
    )
    step = _run(tmp_path, text)

    assert step.program is not None
    assert step.program.step == "a call of Linear, a batch of 7"
    assert (step.program.steps, len(step.ops)) == (1, 1)


def test_tokens_are_told_from_the_prompt_before_them(tmp_path: Path) -> None:
    step = _run(tmp_path, _CACHED)

    assert (step.inputs, step.batch) == (("ids: int64[8,1]", "cache: 2 x bfloat16[8,514,64]"), 8)
    assert step.prompt is not None
    assert step.prompt.inputs == ("ids: int64[8,512]",)
    assert Step.from_json(step.to_json()).prompt == step.prompt
    serves = _said(step)["Serves"]
    assert "tokens/s, 8 at once; the prompts, 512 tokens each, take" in serves
    # What it has cached grows with the batch: 2 tensors of 64 numbers for 514 tokens, and a token's own.
    (stays, grows) = max(step.memory.moments, key=sum)
    assert grows > 8 * 514 * 2 * 64 * 2
    assert stays == pytest.approx(2 * step.parameter_count, rel=0.1)


def test_a_server_that_waits_is_ended_with_the_step_of_its_warm_up(tmp_path: Path) -> None:
    path = tmp_path / "server.py"
    path.write_text(
        "import time, torch\nnet = torch.nn.Linear(500, 300).cuda().eval()\n"
        "for _ in range(5):\n    net(torch.rand(7, 500).cuda())\ntime.sleep(1000)\n"
    )
    step = capture_program_in_child(ProgramOptions(str(path)), "h100-sxm", 12)

    assert step.program is not None
    assert step.program.step == "a call of Linear, a batch of 7"
    assert any("until its time was up" in note for note in step.notes)


def test_an_integer_a_sample_is_no_token_without_a_prompt(tmp_path: Path) -> None:
    text = """
import torch
users = torch.nn.Embedding(1000, 16).cuda()
with torch.no_grad():
    for _ in range(5):
        users(torch.randint(1000, (64, 1)).cuda())
"""
    step = _run(tmp_path, text)

    assert step.inputs == ("input: int64[64,1]",)
    assert _said(step)["Serves"].endswith("samples/s")


def test_all_that_runs_from_one_call_of_a_model_to_its_next_is_the_step(tmp_path: Path) -> None:
    step = _run(
        tmp_path,
        """
import torch
encoder = torch.nn.Linear(64, 8).cuda()
first, second = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 64).cuda()
with torch.no_grad():
    known = encoder(torch.rand(4, 64, device="cuda"))
    for _ in range(20):
        noise = first(known)
        unguided = first(known * 0)
        known = known + noise - unguided
    picture = second(known)
""",
    )

    assert step.program is not None
    assert step.program.step == "2 calls of Linear, a batch of 4"
    assert [entry.op.multiplies for entry in step.ops].count(True) == 2


def test_replays_of_a_cuda_graph_are_steps(tmp_path: Path) -> None:
    step = _run(
        tmp_path,
        """
import torch
net, x = torch.nn.Linear(64, 64).cuda(), torch.zeros(16, 64, device="cuda")
with torch.no_grad():
    for _ in range(3):
        net(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = net(x)
for _ in range(20):
    x.copy_(torch.randn(16, 64))
    graph.replay()
""",
    )

    assert step.program is not None
    assert step.program.step == "a call of a CUDA graph, a batch of 16"
    assert sum(entry.op.multiplies for entry in step.ops) == 1


def test_who_evaluates_before_training_trains(tmp_path: Path) -> None:
    step = _run(
        tmp_path,
        """
import torch
net = torch.nn.Linear(64, 64).cuda()
with torch.no_grad():
    for _ in range(20):
        net(torch.zeros(16, 64, device="cuda"))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
with torch.no_grad():
    for _ in range(20):
        net(torch.zeros(16, 64, device="cuda"))
for _ in range(9):
    net(torch.zeros(8, 64, device="cuda")).sum().backward()
    optimizer.step()
""",
    )

    assert (step.settings.training, step.batch) == (True, 8)


def test_a_training_script_that_only_evaluates_infers(tmp_path: Path) -> None:
    step = _run(
        tmp_path,
        """
import torch
net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
net.eval()
with torch.no_grad():
    for _ in range(20):
        net(torch.zeros(16, 64, device="cuda"))
""",
    )

    assert (step.settings.training, step.batch) == (False, 16)


def test_threads_of_the_program_have_the_gpu(tmp_path: Path) -> None:
    step = _run(
        tmp_path,
        """
import threading
import torch
net = torch.nn.Linear(64, 64).cuda().half().eval()

class Worker(threading.Thread):
    def run(self):
        with torch.no_grad():
            for _ in range(9):
                x = net(torch.tensor([[1.0] * 64] * 16, device="cuda").half()).view(1, 4, 4, 64)
                torch.nn.functional.scaled_dot_product_attention(x, x, x)

worker = Worker()
worker.start()
worker.join()
""",
    )

    assert [entry.op.kind for entry in step.ops if entry.op.multiplies] == ["gemm", "attention"]


def test_a_loss_with_weights_is_no_model(tmp_path: Path) -> None:
    step = _run(
        tmp_path,
        """
import torch
net = torch.nn.Linear(64, 3).cuda().eval()
loss = torch.nn.CrossEntropyLoss(weight=torch.ones(3).cuda())
for _ in range(9):
    loss(net(torch.zeros(16, 64, device="cuda")), torch.zeros(16, dtype=torch.long, device="cuda"))
""",
    )

    assert step.program is not None
    assert step.program.step == "a call of Linear, a batch of 16"
    assert step.inputs == ("input: float32[16,64]",)
    assert [habit.name for habit in step.program.habits] == ["evaluates_with_gradients"]


def test_torchscript_runs_as_the_python_that_it_was_made_of(tmp_path: Path) -> None:
    model = "torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval()"
    x = "torch.zeros(4, 8, device='cuda')"
    calls = f"for _ in range(9): net({x})\n"
    step = _run(
        tmp_path, f"import torch\nnet = torch.jit.trace({model}.cuda(), {x})\nnet.save('a.pt')\n{calls}"
    )

    assert sum(entry.op.multiplies for entry in step.ops) == 1
    assert any("TorchScript" in note for note in step.notes)
    with pytest.raises(TilefitError, match="is TorchScript"):
        _run(tmp_path, f"import torch\nnet = torch.jit.script({model}).cuda()\n{calls}")


def test_an_operator_without_shapes_is_named(tmp_path: Path) -> None:
    text = """
import torch
library = torch.library.Library("mine", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: 2 * x, "CUDA")
net = torch.nn.Linear(8, 8).cuda()
net(torch.ops.mine.twice(torch.ones(4, 8, device="cuda")))
"""
    with pytest.raises(TilefitError, match=r"the results of mine::twice have\n  .*register_fake") as caught:
        _run(tmp_path, text)
    assert caught.value.where.endswith("serve.py:7")


def test_what_fails_behind_the_step_is_told(tmp_path: Path) -> None:
    text = "import torch\nnet = torch.nn.Linear(8, 8).cuda()\nfor _ in '123456': net(torch.ones(4, 8).cuda())"
    step = _run(tmp_path, f"{text}\nraise ValueError('no such picture')")

    assert any("no such picture" in note for note in step.notes)


def test_a_training_that_fails_behind_an_evaluation_has_failed(tmp_path: Path) -> None:
    text = """
import torch
net = torch.nn.Linear(8, 8).cuda()
with torch.no_grad():
    for _ in range(9):
        net(torch.ones(4, 8).cuda())
def train():
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(torch.ones(4, 9).cuda()).sum().backward()
    optimizer.step()
train()
"""
    with pytest.raises(TilefitError, match="RuntimeError"):
        _run(tmp_path, text)


def test_who_forgets_to_say_that_nothing_is_trained_is_told(tmp_path: Path) -> None:
    text = """
import torch
net = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(9):
    net(torch.ones(4, 8).cuda())
"""
    with pytest.raises(TilefitError, match=r"9 times as if to train it(.|\n)*model\.eval\(\)"):
        _run(tmp_path, text)
