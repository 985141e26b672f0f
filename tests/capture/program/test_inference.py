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
from tilefit.options import ProgramOptions, Selection
from tilefit.report.program import headline
from tilefit.report.text import heading

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
    step = capture_program_in_child(ProgramOptions(str(path)), "h100-sxm", 200)

    assert step.program is not None
    assert step.program.step == "a call of Linear, a batch of 7"
    assert any("waited, as for requests" in note for note in step.notes)


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


def test_a_stream_that_is_evaluated_before_training_is_read_on(tmp_path: Path) -> None:
    step = _run(
        tmp_path,
        """
import time
import torch
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(64)
def batches():
    for batch in torch.utils.data.DataLoader(Stream(), 16):
        yield batch.cuda()
net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
given = batches()
with torch.no_grad():
    for _ in range(16):
        net(next(given))
        time.sleep(0.5)
for _ in range(9):
    net(next(given)).sum().backward()
    optimizer.step()
""",
    )

    assert (step.settings.training, step.batch) == (True, 16)


def test_an_evaluation_before_training_makes_what_it_made_before_only_so_often(tmp_path: Path) -> None:
    step = _run(
        tmp_path,
        """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out, self.calls = torch.nn.Linear(2048, 2048), torch.nn.Linear(2048, 3), 0
    def forward(self, x):
        self.calls += 1
        y = self.out(self.hidden(x).relu())
        return {"scores": y, "loss": y.mean(), "name": "net"}
net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(5):
    net.eval()
    calls, losses = net.calls, torch.zeros(400)
    with torch.no_grad():
        for i in range(400):
            out = net(torch.zeros(8 + i % 2, 2048, device="cuda"))
            assert out["scores"].shape == (8 + i % 2, 3) and out["name"] == "net"
            losses[i] = out["loss"].item()
    assert net.calls - calls < 40, net.calls
    net.train()
    for _ in range(9):
        optimizer.zero_grad()
        net(torch.zeros(32, 2048, device="cuda"))["loss"].backward()
        optimizer.step()
""",
    )

    assert (step.settings.training, step.batch) == (True, 32)
    assert step.memory.peak_bytes < 3 * sum(p * 4 for p in (2048 * 2048, 2048, 2048 * 3, 3))


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


def test_a_scripted_class_finds_what_is_defined_beside_it(tmp_path: Path) -> None:
    text = """
import torch
def doubled(x: float) -> float:
    return 2 * x
@torch.jit.script
class Scale:
    def __init__(self, x: float):
        self.x = doubled(x)
net = torch.nn.Linear(8, 8).cuda().eval()
for _ in range(9):
    net(Scale(1.0).x * torch.zeros(4, 8, device="cuda"))
"""
    step = _run(tmp_path, text)

    assert sum(entry.op.multiplies for entry in step.ops) == 1


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


_IMPORTS = (
    "import time, torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, TensorDataset\n"
)


def test_features_of_a_frozen_backbone_are_no_inference(tmp_path: Path) -> None:
    text = """
backbone, head = nn.Linear(64, 32).cuda().eval(), nn.Linear(32, 5).cuda()
features, labels = [], []
with torch.no_grad():
    for x, y in DataLoader(TensorDataset(torch.randn(64000, 64), torch.zeros(64000).long()), 8):
        features.append(backbone(x.cuda()).cpu())
        labels.append(y)
        time.sleep(0.2)
optimizer = torch.optim.SGD(head.parameters(), 0.1)
for epoch in range(9):
    for x, y in DataLoader(TensorDataset(torch.cat(features), torch.cat(labels)), 16):
        nn.functional.cross_entropy(head(x.cuda()), y.cuda()).backward()
        optimizer.step()
"""
    step = _run(tmp_path, _IMPORTS + text)

    assert (step.settings.training, step.batch) == (True, 16)
    assert any("were ended after some seconds" in note for note in step.notes)


def test_an_evaluation_with_an_optimizer_is_cut_short(tmp_path: Path) -> None:
    text = """
net = nn.Linear(64, 5).cuda()
optimizer, right = torch.optim.Adam(net.parameters()), 0
net.eval()
for x, y in DataLoader(TensorDataset(torch.randn(64000, 64), torch.zeros(64000).long()), 8):
    right += (net(x.cuda()).argmax(1) == y.cuda()).sum().item()
    time.sleep(0.2)
"""
    step = _run(tmp_path, _IMPORTS + text)

    assert (step.settings.training, step.batch) == (False, 8)
    assert any("were ended after some seconds" in note for note in step.notes)


def test_who_is_stopped_in_the_midst_of_calls_is_told(tmp_path: Path) -> None:
    text = "net = nn.Linear(64, 5).cuda()\nwhile True:\n    net(torch.ones(8, 64).cuda())\n    time.sleep(.1)"
    step = _run(tmp_path, _IMPORTS + text)

    assert any("had trained nothing until then" in note for note in step.notes)


def test_calls_from_two_lines_through_one_function_are_one_step(tmp_path: Path) -> None:
    text = """
net = nn.Linear(16, 16).cuda().eval()
def noise(x, condition):
    return net(x + condition)
x = torch.zeros(4, 16).cuda()
with torch.no_grad():
    for _ in range(9):
        unguided = noise(x, 0)
        x = x + noise(x, 1) - unguided
"""
    step = _run(tmp_path, _IMPORTS + text)

    assert step.program is not None
    assert step.program.step == "2 calls of Linear, a batch of 4"


def test_a_draft_is_part_of_the_step_of_its_target(tmp_path: Path) -> None:
    text = """
class Draft(nn.Linear): pass
class Target(nn.Linear): pass
draft, target = Draft(16, 16).cuda().eval(), Target(16, 16).cuda().eval()
def run(model, x):
    return model(x)
x = torch.zeros(1, 16).cuda()
with torch.no_grad():
    for _ in range(9):
        for _ in range(4):
            x = run(draft, x)
        x = run(target, x)
"""
    step = _run(tmp_path, _IMPORTS + text)

    assert step.program is not None
    assert step.program.step == "a call of Target, 4 calls of Draft, a batch of 1"


_TWO_MODELS = """
class Draft(nn.Linear): pass
class Target(nn.Linear): pass
draft, target = Draft(16, 16).cuda().eval(), Target(16, 16).cuda().eval()
def tokens(model, x):
    for _ in range(9):
        x = model(x)[:1]
with torch.no_grad():
    tokens(target, torch.zeros(32, 16).cuda())
    tokens(draft, torch.zeros(8, 16).cuda())
"""


def test_models_one_after_the_other_are_no_target_and_draft(tmp_path: Path) -> None:
    step = _run(tmp_path, _IMPORTS + _TWO_MODELS)

    assert step.program is not None
    assert step.program.step == "a call of Target, a batch of 1"
    assert step.prompt is not None
    assert step.prompt.inputs == ("input: float32[32,16]",)


def test_models_alone_and_then_together_are_their_step_together(tmp_path: Path) -> None:
    """Its prompt was not the first of all calls."""
    together = """
    x = torch.zeros(1, 16).cuda()
    for _ in range(9):
        for _ in range(3):
            x = draft(x)
        x = target(x)
"""
    step = _run(tmp_path, _IMPORTS + _TWO_MODELS + together)

    assert step.program is not None
    assert step.program.step == "a call of Target, 3 calls of Draft, a batch of 1"


def test_beams_are_of_one_sample(tmp_path: Path) -> None:
    text = """
import transformers
sizes = dict(n_layer=1, n_embd=32, n_head=2, vocab_size=99, eos_token_id=None, pad_token_id=0)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).cuda().eval()
ids = torch.randint(99, (8, 32)).cuda()
model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=4, max_new_tokens=9)
"""
    step = _run(tmp_path, _IMPORTS + text)

    assert step.batch == 8
    assert step.inputs[0] == "input_ids: int64[32,1]"
    assert step.program is not None
    assert step.program.step == "a call of GPT2LMHeadModel, a batch of 8 with 4 beams each"
    assert "tokens/s, 8 at once; the prompts, 32 tokens each" in _said(step)["Serves"]


def test_gradients_of_inputs_train_nothing(tmp_path: Path) -> None:
    attack = """
net, x = nn.Linear(64, 10).cuda().eval(), torch.rand(32, 64).cuda()
change = torch.zeros_like(x, requires_grad=True)
for _ in range(9):
    net(x + change).mean().backward()
    change.data = change + change.grad.sign()
    change.grad = None
"""
    step = _run(tmp_path, _IMPORTS + attack)
    report = Assessment(step, resolve("h200")[0]).report

    assert step.program is not None
    assert step.program.step == "a batch of 32, gradients alone: no parameter changes"
    assert heading(report).endswith("forward and backward pass")
    assert not step.program.habits  # its gradients are used
    by_hand = "    with torch.no_grad():\n        for p in net.parameters():\n            p -= 0.1 * p.grad\n"
    step = _run(tmp_path, _IMPORTS + attack + by_hand)
    report = Assessment(step, resolve("h200")[0]).report
    assert heading(report).endswith("training step")


def test_tensors_that_no_module_holds_are_trained(tmp_path: Path) -> None:
    text = """
w = torch.randn(64, 10, device="cuda", requires_grad=True)
for _ in range(9):
    (torch.rand(32, 64).cuda() @ w).square().mean().backward()
    with torch.no_grad():
        w -= 0.1 * w.grad
        w.grad = None
"""
    step = _run(tmp_path, _IMPORTS + text)

    assert step.program.step == "no optimizer"
    assert heading(Assessment(step, resolve("h200")[0]).report).endswith("training step")


def test_columns_of_a_table_are_no_tokens(tmp_path: Path) -> None:
    text = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, 16), nn.Linear(26 * 16, 1)
        self.each = nn.Linear(16, 16)
    def forward(self, fields):
        return self.head(WHAT(self.embed(fields)).flatten(1))
net = Net().cuda()
for _ in range(9):
    net(torch.randint(1000, (512, 26)).cuda()).mean().backward()
"""
    for what, tokens in (("", 0), ("self.each", 26)):
        step = _run(tmp_path, _IMPORTS + text.replace("WHAT", what))
        assert step.inputs == ("fields: int64[512,26]",)
        assert Assessment(step, resolve("h200")[0]).report.tokens == tokens


def test_what_a_model_reads_of_itself_is_not_the_loss(tmp_path: Path) -> None:
    text = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
    def forward(self, x, mask):
        x = self.linear(x)
        return x if mask.all() else x.masked_fill(~mask, 0)
net = Net().cuda()
optimizer = torch.optim.Adam(net.parameters(), fused=True)
x, mask = torch.rand(8, 64).cuda(), torch.ones(8, 64).cuda() > 0
for _ in range(9):
    loss = net(x, mask).mean()
    loss.backward()
    optimizer.step()
"""
    advice = []
    for more in ("", "    print(loss.item())\n"):
        step = _run(tmp_path, _IMPORTS + text + more)
        report = Assessment(step, resolve("h200")[0], Selection(min_gain=-1.0)).report
        advice += [each.fix for each in report.findings if each.code == "SYN001"]
    within, both = advice
    assert "loss" not in within
    assert "torch.where" in within
    assert "loss.detach()" in both
    assert "torch.where" in both
