"""Programs, run unmodified under an emulated GPU."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest

from tilefit import rules
from tilefit.assessment import Assessment
from tilefit.capture.child import capture_in_child, capture_program_in_child, capture_target
from tilefit.cost import estimate_step
from tilefit.cost.priced import resolve
from tilefit.cost.uncompiled import beside
from tilefit.errors import TilefitError
from tilefit.ops import OPTIMIZER, Attention, Step
from tilefit.ops.program import TO_GPU, TO_HOST, WAIT
from tilefit.options import ProgramOptions, Selection, TargetOptions

_NET = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3)
        self.norm = nn.BatchNorm2d(32)
        self.rnn = nn.LSTM(32, 64, batch_first=True)
        self.attention = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True)
        self.out = nn.Linear(64, 10)

    def forward(self, images):
        x = F.relu(self.norm(self.conv(images))).flatten(2).transpose(1, 2)
        x, _ = self.rnn(x)
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.out(x.mean(1))

def build():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()
        def forward(self, images, labels):
            return {"loss": F.cross_entropy(self.net(images), labels)}
    return WithLoss(), {"images": torch.randn(16, 3, 18, 18), "labels": torch.zeros(16, dtype=torch.long)}
"""

_TRAIN = (
    _NET
    + """
if __name__ == "__main__":
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--log", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = Net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.randn(320, 3, 18, 18), torch.randint(0, 10, (320,)))
    loader = torch.utils.data.DataLoader(data, 16, shuffle=True, num_workers=2, pin_memory=True)
    for step, (images, labels) in enumerate(loader, 1):
        images, labels = images.to(device, non_blocking=True), labels.to(device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(images), labels)
        loss.backward()
        if step % arguments.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        if arguments.log:
            print(step, loss.item())
    raise SystemExit("ran too far")
"""
)


def _run(folder: Path, text: str, *arguments: str, **options: int) -> Step:
    path = folder / "train.py"
    path.write_text(text)
    return capture_program_in_child(ProgramOptions(str(path), arguments, **options), "h100-sxm", 100)


def test_a_program_prices_as_its_model_by_a_factory(tmp_path: Path) -> None:
    step = _run(tmp_path, _TRAIN, "--log")
    own = capture_target(f"{tmp_path / 'train.py'}:build", TargetOptions(amp="bf16"))

    # PyTorch's own autocast casts the scores within the softmax, the simulated one before it.
    products = [[e.op for e in each.ops if e.op.multiplies] for each in (step, own)]
    assert products[0] == products[1]
    (gpu,) = resolve("h100-sxm")
    times = [estimate_step(each, gpu).gpu_time_s for each in (step, own)]
    assert times[0] == pytest.approx(times[1], rel=0.01)
    # Here what cuDNN reserves is counted, too.
    reserve = 256 * 16 * 5 * 64 * 2
    assert step.memory.peak_bytes == pytest.approx(own.memory.peak_bytes + reserve, rel=0.02)
    inputs = 16 * 3 * 18 * 18 * 4 + 16 * 8  # here activations as others
    assert step.memory.saved_bytes == pytest.approx(own.memory.saved_bytes + reserve + inputs, rel=0.02)
    assert step.parameter_count == own.parameter_count
    assert (step.settings.amp, step.settings.optimizer, step.batch) == ("bf16", "adamw", 16)
    assert step.program is not None
    assert step.program.step == "a batch of 16, AdamW, bf16 autocast"
    assert step.program.steps == 3
    events = [(e.kind, e.name, e.bytes, e.blocks) for e in step.program.events]
    assert events == [
        (WAIT, "item", 0, True),
        (TO_GPU, "to", 16 * 3 * 18 * 18 * 4, False),
        (TO_GPU, "to", 128, True),
    ]
    assert [(a.name, a.what) for a in step.program.assumptions] == [("item", "fp32[]")]


def test_what_the_host_does_itself_is_noted_but_not_what_loaders_do(tmp_path: Path) -> None:
    step = _run(
        tmp_path,
        """
import torch

class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.rand(500)

net = torch.nn.Linear(500, 10).to("cuda")
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for images in torch.utils.data.DataLoader(Noise(), 8):
    more = torch.randn(8, 500)
    loss = net((images + more).to("cuda")).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    )
    assert step.program is not None
    assert dict(step.program.host_work) == {"randn": 4000, "add": 4000}
    assert Step.from_json(step.to_json()).program == step.program


def test_what_only_a_cycle_of_references_holds_is_no_part_of_the_step(tmp_path: Path) -> None:
    text = """
import gc
import torch
gc.disable()
net = torch.nn.Linear(64, 64).to("cuda")
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for _ in range(4):
    other = torch.nn.Linear(1 << 13, 1 << 13, device="cuda")
    other.again = [other]
    del other
    net(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    step = _run(tmp_path, text)
    # What one step leaves behind, not three.
    assert step.memory.peak_bytes < 2 * 4 << 26


def test_accumulated_micro_batches_are_one_step(tmp_path: Path) -> None:
    step = _run(tmp_path, _TRAIN, "--accumulate", "2")

    assert step.program is not None
    assert step.program.step.startswith("2 micro-batches of 16, AdamW")
    assert step.program.micro_batches == 2
    assert step.batch == 32
    assert sum(e.name == "aten.lstm" for e in step.ops) == 2
    assert not any(e.kind == WAIT for e in step.program.events)


@pytest.mark.parametrize(
    ("backward", "said"),
    [
        ("for loss in losses: loss.backward()", "3 micro-batches of 8, SGD"),
        ("sum(losses).backward()", "a batch of 8, SGD"),  # three views of the same samples
    ],
)
def test_several_forward_passes_may_go_ahead_of_their_backward_passes(
    tmp_path: Path, backward: str, said: str
) -> None:
    text = f"""
import torch
net = torch.nn.Linear(64, 64).to("cuda")
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for _ in range(4):
    losses = [net(torch.randn(8, 64, device="cuda")).sum() for _ in range(3)]
    {backward}
    optimizer.step()
    optimizer.zero_grad()
"""
    step = _run(tmp_path, text)
    assert step.program is not None
    assert step.program.step.startswith(said)


def test_a_batch_that_is_given_again_is_one_of_the_loader(tmp_path: Path) -> None:
    step = _run(
        tmp_path,
        """
import time
import torch
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.3)
        return torch.zeros(1024)
net = torch.nn.Linear(1024, 10).cuda()
optimizer = torch.optim.SGD(net.parameters())
for x in torch.utils.data.DataLoader(Slow(), 8, pin_memory=True):
    net(x.cuda(non_blocking=True)).sum().backward()
    optimizer.step()
""",
    )
    assert step.program is not None
    assert "again and again" in step.program.fake[0]
    assert [(e.pinned, e.bytes) for e in step.program.events if e.kind == TO_GPU] == [(True, 8 * 4096)]
    assert not step.program.host_work


def test_who_logs_how_full_the_gpu_is_is_answered(tmp_path: Path) -> None:
    step = _run(
        tmp_path,
        """
import subprocess
import torch
net = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.Adam(net.parameters())
held = sum(p.nbytes for p in net.parameters())
query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
for _ in range(4):
    torch.cuda.reset_peak_memory_stats()
    net(torch.randn(4096, 1024).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert 3 * held <= torch.cuda.memory_allocated() < 3.1 * held  # parameters and Adam's two averages
    assert torch.cuda.max_memory_allocated() > 3 * held + 4096 * 1024 * 4
    assert torch.cuda.mem_get_info()[0] <= torch.cuda.mem_get_info()[1] - torch.cuda.max_memory_allocated()
    assert "Allocated memory" in torch.cuda.memory_summary()
    assert subprocess.check_output(query, text=True) == "NVIDIA H100 SXM 80GB, 81920\\n"
    try:
        import pynvml
    except ImportError:
        continue
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert pynvml.nvmlDeviceGetMemoryInfo(handle).used == torch.cuda.memory_allocated()
    assert pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU) == 0
""",
    )
    assert step.memory.peak_bytes > 4096 * 1024 * 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import torch\nprint('nothing to do')", "without a step"),
        (
            _NET + "net = Net()\noptimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
            "for _ in range(9):\n    net(torch.randn(2, 3, 9, 9)).sum().backward()\n    optimizer.step()\n",
            "computes on the CPU",
        ),
    ],
)
def test_what_trains_nothing_on_the_gpu_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TilefitError, match=said):
        _run(tmp_path, text)


def test_of_two_optimizers_each_steps_in_the_step(tmp_path: Path) -> None:
    step = _run(
        tmp_path,
        """
import torch
from torch import nn
generator, critic = nn.Linear(64, 300).cuda(), nn.Linear(300, 1).cuda()
first, second = torch.optim.RMSprop(critic.parameters()), torch.optim.Adam(generator.parameters())
scaler = torch.amp.GradScaler("cuda")
for step in range(1, 100):
    made = generator(torch.randn(32, 64, device="cuda"))
    loss = critic(made.detach()).mean()
    first.zero_grad(); scaler.scale(loss).backward(); scaler.step(first)
    if step % 3 == 0:
        second.zero_grad(); scaler.scale(critic(made).mean()).backward(); scaler.step(second)
    scaler.update()
""",
    )

    assert step.program is not None
    assert "RMSprop, Adam" in step.program.step
    assert len(step.program.optimizers) == 2  # though one line made both
    assert sum(e.op.multiplies and e.phase == "forward" for e in step.ops) == 3 * 2 + 1
    assert sum(e.kind == WAIT for e in step.program.events) >= 4  # found_inf, of each step of an optimizer


_FACTORIES = """
import torch, torchvision
from torch import nn

def plain():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return _step(nn.Linear(479, 1024).to(device), torch.randn(64, 479, device=device))

def regnet():
    return _step(torchvision.models.regnet_y_400mf(), torch.randn(2, 3, 64, 64))

def partial():
    net, own = nn.Linear(8, 8), nn.Linear(8, 8, device="cpu")
    def step():
        net(torch.randn(4, 8)).sum().backward()
        own(torch.randn(4, 8, device="cpu")).sum().backward()
    return step

def _step(net, x):
    optimizer = torch.optim.AdamW(net.parameters())
    def step():
        loss = net(x).mean()
        if torch.isnan(loss):
            return
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return step
"""


def test_a_step_that_names_a_device_or_reads_values_is_whole(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(_FACTORIES)

    def flop(name: str) -> int:
        step = capture_in_child(f"{tmp_path / 'steps.py'}:{name}", TargetOptions(), 100, fresh=True)
        assert step.settings.training
        assert step.settings.optimizer == "adamw"
        return step.tensor_flop

    assert flop("plain") == 2 * 2 * 64 * 479 * 1024
    regnet = capture_target("torchvision:regnet_y_400mf", TargetOptions(batch=2, image_size=64))
    assert flop("regnet") == regnet.tensor_flop


def test_a_part_of_a_step_on_the_cpu_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(_FACTORIES)
    with pytest.raises(TilefitError, match="another device") as error:
        capture_target(f"{tmp_path / 'steps.py'}:partial", TargetOptions())
    assert "steps.py:16" in error.value.where


def test_what_cuda_runs_as_one_kernel_or_many_is_recorded_so(tmp_path: Path) -> None:
    """As seen on a GPU: the gradient of SiLU is one kernel, that of a table of bags is sorted first, and
    counting reads the least and the most."""
    step = _run(
        tmp_path,
        """
import torch
from torch import nn
bags, rest = nn.EmbeddingBag(1000, 32).cuda(), nn.Sequential(nn.SiLU(), nn.Mish(), nn.Linear(32, 4)).cuda()
optimizer = torch.optim.SGD([*bags.parameters(), *rest.parameters()], lr=0.1)
for _ in range(5):
    x = torch.randint(1000, (8, 16)).cuda()
    x.flatten().bincount(minlength=1000)
    optimizer.zero_grad()
    rest(bags(x)).sum().backward()
    optimizer.step()
""",
    )
    names = [entry.name for entry in step.ops]
    assert names.count("aten.silu_backward") == names.count("aten.mish_backward") == 1
    assert "aten.sigmoid" not in names
    (gradient,) = (entry.op for entry in step.ops if entry.name == "aten._embedding_bag_backward")
    assert gradient.kernels == 22
    (bag,) = (entry.op for entry in step.ops if entry.name == "aten._embedding_bag")
    assert bag.read_bytes < 8 * 16 * (32 * 4 + 8) + 100  # the rows that are looked up
    assert step.program is not None
    assert [event.name for event in step.program.events if event.kind == WAIT] == ["bincount"] * 2
    assert {"aten.min", "aten.max", "aten.scatter_add_"} <= set(names)


def test_compiled_flex_attention_computes_the_blocks_of_its_mask_and_csr_is_a_sparse_matrix(
    tmp_path: Path,
) -> None:
    step = _run(
        tmp_path,
        """
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

fused = torch.compile(flex_attention)
qkv = nn.Linear(64, 192).cuda()
optimizer = torch.optim.SGD(qkv.parameters(), 0.1)
causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, device="cuda")
same = create_block_mask(lambda b, h, q, k: q // 128 == k // 128, None, None, 512, 512, device="cuda")
graph = torch.eye(512).to_sparse_csr().to("cuda")
for _ in range(4):
    x = torch.randn(2, 512, 64, device="cuda")
    q, k, v = qkv(graph @ x[0] + x).view(2, 512, 3, 4, 16).permute(2, 0, 3, 1, 4)
    loss = fused(q, k, v, block_mask=causal).mean() + fused(q, k, v, block_mask=same).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    )
    forward = [
        entry.op.scores for entry in step.ops if isinstance(entry.op, Attention) and entry.phase == "forward"
    ]
    assert forward == [2 * 4 * 512 * 513 // 2, 2 * 4 * 512 * 512 // 4]
    (product,) = (entry for entry in step.ops if entry.name == "tilefit.sparse_product")
    assert product.outputs[0].shape == (512, 64)
    assert product.op.kernels == 7


def test_what_multiplies_a_transposed_sparse_matrix_waits_for_its_order(tmp_path: Path) -> None:
    """As the backward pass of every graph convolution does: the transposed matrix is sorted first."""
    step = _run(
        tmp_path,
        """
import torch

graph = (torch.rand(64, 64) < 0.1).float().to_sparse().cuda()
weight = torch.nn.Parameter(torch.randn(64, 16, device="cuda"))
optimizer = torch.optim.SGD([weight], 0.1)
for _ in range(6):
    loss = torch.sparse.mm(graph, weight).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    )
    products = [entry.phase for entry in step.ops if entry.name == "tilefit.sparse_product"]
    assert len(products) == 2
    assert [entry.op.kernels for entry in step.ops if entry.name == "tilefit.coalesced_values"] == [16]
    assert step.program is not None
    assert [event.name for event in step.program.events if event.blocks] == ["coalesce"] * 5


_TWO = """
import torch
from torch import nn

{made}
both = nn.Sequential(Net(), Net()).cuda()
one, two = both
{compiled}
optimizer = torch.optim.SGD(both.parameters(), 0.1)
for _ in range(4):
    x = torch.randn(8, 16, device="cuda")
    optimizer.zero_grad()
    run(x)
    optimizer.step()
"""
_NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(24)))
    {decorated}
    def forward(self, x):
        return self.layers(x)

def run(x):
    two(one(x)).sum().backward()
"""


@pytest.mark.parametrize(
    ("compiled", "decorated", "is_compiled", "is_told"),
    [
        ("", "", False, False),
        ("two = torch.compile(two); one.compile()", "", True, False),
        ("run = torch.compile(run, mode='max-autotune')", "", True, False),
        ("", "@torch.compile", True, False),
        ("both = torch.compile(both)", "", False, False),  # its parts are called
        ("one, two = (torch.compile(each, disable=True) for each in both)", "", False, False),
        ("one, two = (torch.compile(each, backend='aot_eager') for each in both)", "", False, False),
        ("two.compile()", "", False, True),
        ("per_sample = torch.func.vmap(torch.compile(two)); two = lambda x: per_sample(x)", "", False, False),
    ],
)
def test_a_step_is_compiled_where_most_of_its_forward_pass_is(
    tmp_path: Path, compiled: str, decorated: str, is_compiled: bool, is_told: bool
) -> None:
    program = _TWO.format(made=_NET.format(decorated=decorated), compiled=compiled)
    step = _run(tmp_path, program)
    assert step.settings.compiled == is_compiled
    assert step.settings.cuda_graph == ("max-autotune" in compiled)
    assert any("torch.compile covers" in note for note in step.notes) == is_told


@pytest.mark.parametrize(
    ("layers", "compiled", "is_compiled", "is_told"),
    [
        ("nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)", "net.compile()", False, True),
        ("nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)", "net = torch.compile(net)", True, False),
        ("nn.Linear(16, 16), nn.Sequential(Net(), Net())", "net.compile()", True, True),
    ],
)
def test_of_a_class_of_pytorch_s_own_compile_leaves_what_is_pytorch_s(
    tmp_path: Path, layers: str, compiled: str, is_compiled: bool, is_told: bool
) -> None:
    text = f"{_TWO}".partition("both =")[0].format(made=_NET.format(decorated=""))
    text += f"""
net = nn.Sequential({layers}).cuda()
{compiled}
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(4):
    optimizer.zero_grad()
    net(torch.randn(8, 16, device="cuda")).sum().backward()
    optimizer.step()
"""
    step = _run(tmp_path, text)
    assert step.settings.compiled == is_compiled
    assert any("Sequential.compile() compiles nothing" in note for note in step.notes) == is_told


_PENALTY = """
import torch
from torch import nn

class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 512), nn.Linear(512, 1)
    def forward(self, x):
        return self.down(nn.functional.silu(self.up(x)))

critic = Critic().cuda()
optimizer = torch.optim.Adam(critic.parameters())
for _ in range(4):
    x = torch.randn(4096, 512, device="cuda", requires_grad=True)
    (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=MANY)
    loss = (slope.norm(dim=1) - 1).pow(2).mean() + critic(x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("many", [False, True])
def test_what_is_differentiated_twice_is_not_advised_to_be_compiled(tmp_path: Path, many: bool) -> None:
    """A compiled model's backward pass cannot be differentiated: PyTorch raises."""
    step = _run(tmp_path, _PENALTY.replace("MANY", str(many)))
    assert step.program is not None
    lines = [each.site.source for each in step.program.habits if each.name == "differentiates_backward"]
    assert [line.rpartition(":")[2] for line in lines] == ["16"] * many
    (gpu,) = resolve("h100-sxm")
    found = {each.code for each in Assessment(step, gpu).findings}
    assert ("NTC001" in found) != many


def test_samples_that_a_transform_maps_over_are_the_batch(tmp_path: Path) -> None:
    """Per-sample gradients: of what the model is called with inside, all samples are one."""
    step = _run(
        tmp_path,
        """
import torch
from torch.func import functional_call, grad, vmap

net = torch.nn.Linear(16, 4).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def loss(parameters, x, y):
    return torch.nn.functional.cross_entropy(functional_call(net, parameters, (x[None],)), y[None])

for _ in range(4):
    x, y = torch.randn(32, 16, device="cuda"), torch.randint(0, 4, (32,), device="cuda")
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    each = vmap(grad(loss), (None, 0, 0))(parameters, x, y)
    for name, p in net.named_parameters():
        p.grad = each[name].mean(0)
    optimizer.step()
""",
    )
    assert (step.batch, step.parameter_count) == (32, 68)
    assert step.inputs == ("input: float32[32,1,16]",)


def test_what_is_saved_is_copied_to_the_host_each_memory_once(tmp_path: Path) -> None:
    step = _run(
        tmp_path,
        """
import torch
net = torch.nn.Linear(64, 32).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for number in range(4):
    net(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    states = {"net": net.state_dict(), "same": net.weight.T, "optimizer": optimizer.state_dict()}
    torch.save(states, "last.pt")
""",
    )
    assert step.program is not None
    sizes = [event.bytes for event in step.program.events if event.kind == TO_HOST and event.blocks]
    assert sorted(sizes) == [128, 128, 8192, 8192]


def test_a_list_of_the_gpu_s_numbers_is_read_one_by_one(tmp_path: Path) -> None:
    step = _run(
        tmp_path,
        """
import torch
net = torch.nn.Linear(64, 32).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    losses = [net(torch.randn(8, 64, device="cuda")).pow(n).mean() for n in (1, 2)]
    sum(losses).backward()
    optimizer.step()
    print(torch.tensor(losses).mean().item(), torch.tensor([3, losses[0]], device="cuda").shape)
""",
    )
    assert step.program is not None
    kinds = [event.kind for event in step.program.events]
    assert kinds == [WAIT] * 3 + [TO_GPU]


def test_calls_wait_as_often_as_on_a_gpu(tmp_path: Path) -> None:
    """As ``torch.cuda.set_sync_debug_mode`` told on an H100 (PyTorch 2.11)."""
    step = _run(
        tmp_path,
        """
import torch
net = torch.nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    scores = net(torch.randn(8, 16, device="cuda"))
    scores.sum().backward()
    optimizer.step()
    torch.distributions.Categorical(logits=scores, validate_args=False).sample()
    torch.multinomial(scores.softmax(-1), 3, replacement=True)
    torch.linalg.cholesky(scores.T @ scores)
    torch.linalg.cholesky_ex(scores.T @ scores)
    torch.linalg.svd(scores), torch.linalg.eigh(scores.T @ scores), torch.linalg.pinv(scores)
    torch.equal(scores, scores + 1)
    torch.histc(scores), torch.histc(scores, 10, -1.0, 1.0)
    torch.repeat_interleave(scores, torch.zeros(8, dtype=torch.long, device="cuda"), dim=0)
""",
    )
    assert step.program is not None
    waits = Counter(event.name for event in step.program.events)
    assert waits == {"linalg": 1 + 2 + 1 + 2, "equal": 1, "histc": 2, "repeat_interleave": 2}


_TWO_UPDATES = """
import torch
from torch import nn

class Orthogonal(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad @ parameter.grad.T @ parameter.grad, alpha=0.1)

table = nn.EmbeddingBag(1000, 64, sparse=True).cuda()
body, head = nn.Linear(64, 64).cuda(), nn.Linear(64, 10).cuda()
optimizers = [Orthogonal([body.weight]), torch.optim.SGD([*table.parameters(), body.bias])]
optimizers.append(torch.optim.AdamW(head.parameters()))
for _ in range(5):
    rows = torch.randint(1000, (32, 4), device="cuda")
    loss = head(body(table(rows))).logsumexp(1).mean()
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
"""


def test_of_several_optimizers_only_what_can_be_fused_is_advised_to_be(tmp_path: Path) -> None:
    """Neither an optimizer of the user's own nor PyTorch's with sparse gradients has a fused form."""
    step = _run(tmp_path, _TWO_UPDATES)
    (found,) = rules.run(step, resolve("h200")[0], select=["NTC003"], min_gain=0)
    updates = [entry for entry in step.ops if entry.phase == OPTIMIZER]
    of_adamw = [entry for entry in updates if entry.site.fallback]
    assert 0 < len(of_adamw) < len(updates)
    assert found.message == f"adamw runs as {len(of_adamw)} multi-tensor operations, not as one"
    assert f"{64 * 10 + 10} parameters" in found.arithmetic[0]


def test_the_batch_is_that_of_the_pass_that_is_trained_on(tmp_path: Path) -> None:
    """An agent acts with gradients on, sample by sample, and learns from many."""
    acting = """
import torch
from torch import nn
net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2)).cuda()
optimizer = torch.optim.Adam(net.parameters())
for _ in range(5):
    for _ in range(3):
        net(torch.randn(1, 4, device="cuda")).argmax(1)
    loss = net(torch.randn(96, 4, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    step = _run(tmp_path, acting)
    assert step.batch == 96
    assert step.inputs == ("input: float32[96,4]",)
    assert step.program is not None
    assert [each.call.partition(":")[2] for each in step.program.models] == ["9:49"]
    assert step.program.step == "a batch of 96, Adam"


def test_what_a_method_calls_is_advised_to_be_compiled_there(tmp_path: Path) -> None:
    """torch.compile(agent) compiles calls of the agent, which an agent's methods are none of."""
    text = """
import torch
from torch import nn
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.GELU(), nn.Tanh())
        self.head = nn.Linear(64, 4)
    def value(self, x):
        return self.head(self.body(x).tanh().sin())
    def forward(self, x):
        return self.value(x)
agent = Agent().cuda()
optimizer = torch.optim.Adam(agent.parameters())
for _ in range(5):
    optimizer.zero_grad()
    CALL(torch.randn(4096, 64, device="cuda")).square().mean().backward()
    optimizer.step()
"""
    (gpu,) = resolve("h100-sxm")
    advised = []
    for call in ("agent.value", "agent"):
        report = Assessment(_run(tmp_path, text.replace("CALL", call)), gpu).report
        advised += [each.fix for each in report.findings if each.code == "NTC001"]
    assert "model.value = torch.compile(model.value)" in advised[0]
    assert advised[1].startswith("Compile the model: model = torch.compile(model).")


def test_an_ensemble_has_the_parameters_that_are_stacked(tmp_path: Path) -> None:
    step = _run(
        tmp_path,
        """
import copy
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
nets = [nn.Linear(64, 8).cuda() for _ in range(5)]
parameters, buffers = stack_module_state(nets)
base = copy.deepcopy(nets[0]).to("meta")
assert base.weight.is_meta
optimizer = torch.optim.Adam(parameters.values())
for _ in range(5):
    x = torch.randn(32, 64, device="cuda")
    one = lambda p, b, x: functional_call(base, (p, b), (x,))
    optimizer.zero_grad()
    vmap(one, (0, 0, None))(parameters, buffers, x).square().mean().backward()
    optimizer.step()
""",
    )
    assert step.parameter_count == 5 * (64 * 8 + 8)
    assert step.memory.parameter_bytes == 4 * step.parameter_count
    assert step.batch == 32


def test_copies_that_an_optimizer_trains_are_no_further_parameters(tmp_path: Path) -> None:
    """Of mixed precision by hand: what is computed with is the model's, in half precision."""
    step = _run(
        tmp_path,
        """
import torch
net = torch.nn.Linear(64, 8).cuda().half()
masters = [torch.nn.Parameter(each.detach().float()) for each in net.parameters()]
optimizer = torch.optim.Adam(masters)
for _ in range(5):
    net(torch.randn(32, 64, device="cuda").half()).float().square().mean().backward()
    for master, each in zip(masters, net.parameters()):
        master.grad, each.grad = each.grad.float(), None
    optimizer.step()
    with torch.no_grad():
        for master, each in zip(masters, net.parameters()):
            each.copy_(master)
""",
    )
    assert step.parameter_count == 64 * 8 + 8
    assert step.memory.parameter_bytes == 2 * step.parameter_count


def test_values_that_a_compiled_model_reads_are_noted(tmp_path: Path) -> None:
    text = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 64)
    def forward(self, x):
        x = self.up(x)
        return torch.where(x > 0, x, -x).sin().cos() if x.sum() > -1e9 else x
net = COMPILED
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(5):
    loss = net(torch.randn(32, 64, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
    compiled = _run(tmp_path, text.replace("COMPILED", "torch.compile(Net().cuda())"))
    assert [note for note in compiled.notes if "reads 1 tensor value" in note]
    assert compiled.settings.split
    eager = _run(tmp_path, text.replace("COMPILED", "Net().cuda()"))
    assert not eager.notes
    assert not eager.settings.split


def test_a_solver_that_tries_until_its_error_is_small_gets_on(tmp_path: Path) -> None:
    """And once it is known that it does, a step is not made of what it tried before."""
    step = _run(
        tmp_path,
        """
import torch
net = torch.nn.Linear(2048, 2048).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def solved(x):
    t, size = 0.0, 0.5
    while t < 1:
        further = x + size * net(x)
        error = (further - x).abs().max()
        if error <= 1:
            x, t = further, t + 0.5
        size = 0.5
    return x

for _ in range(4):
    optimizer.zero_grad()
    solved(torch.randn(8, 2048, device="cuda")).sum().backward()
    optimizer.step()
""",
    )
    products = [entry for entry in step.ops if entry.op.multiplies and entry.phase == "forward"]
    assert len(products) == 2


def test_a_model_that_copies_arrays_itself_has_a_batch(tmp_path: Path) -> None:
    step = _run(
        tmp_path,
        """
import numpy, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.out = torch.nn.Embedding(100, 32), torch.nn.Linear(32, 8)

    def forward(self, seen):
        return self.out(self.items(torch.LongTensor(seen).to("cuda")))

net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    net(numpy.zeros((16, 20), dtype="int32")).sum().backward()
    optimizer.step()
""",
    )
    assert (step.batch, step.inputs) == (16, ("seen: int32[16,20]",))


def test_a_solver_goes_one_step_to_each_of_many_times(tmp_path: Path) -> None:
    """A loop that goes on while a time is not reached ends, also if it has been asked very often."""
    step = _run(
        tmp_path,
        """
import torch
net = torch.nn.Linear(2048, 2048).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def solved(x, times):
    now = net(x).abs().max()
    for until in times:
        while until > now:
            x = x + net(x)
            now = now + x.abs().max()
    return x

with torch.no_grad():
    solved(torch.randn(8, 2048, device="cuda"), torch.linspace(0, 1, 600).cuda())
for _ in range(4):
    optimizer.zero_grad()
    solved(torch.randn(8, 2048, device="cuda"), torch.linspace(0, 1, 40).cuda()).sum().backward()
    optimizer.step()
""",
    )
    products = [entry for entry in step.ops if entry.op.multiplies and entry.phase == "forward"]
    assert 10 <= len(products) <= 160


def test_a_loss_of_ones_own_with_buffers_is_no_model(tmp_path: Path) -> None:
    """As of DETR and DINO, whose losses are modules with weights of classes, or a center."""
    step = _run(
        tmp_path,
        """
import torch
from torch import nn
class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 8))
    def forward(self, scores, aims):
        return (scores - aims - self.center).square().mean()
net, loss = nn.Linear(16, 8).cuda(), Loss().cuda()
optimizer = torch.optim.Adam(net.parameters())
for _ in range(5):
    out = net(torch.randn(32, 4, 16, device="cuda"))
    optimizer.zero_grad()
    loss(out.flatten(0, 1), torch.zeros(128, 8, device="cuda")).backward()
    optimizer.step()
""",
    )
    assert step.inputs == ("input: float32[32,4,16]",)
    assert step.batch == 32


def test_tables_that_look_up_numbers_of_their_own_are_no_samples(tmp_path: Path) -> None:
    """As of a DLRM, whose sparse features are a list of as many numbers as each table is asked for."""
    step = _run(
        tmp_path,
        """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(1000, 16, mode="sum") for _ in range(4))
        self.out = nn.Linear(4 * 16 + 8, 1)
    def forward(self, dense, offsets, numbers):
        looked = [table(n, o) for table, n, o in zip(self.tables, numbers, offsets)]
        return self.out(torch.cat((*looked, dense), 1))
net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(5):
    numbers = [torch.randint(1000, (512 + 7 * i,)).cuda() for i in range(4)]
    offsets = torch.arange(256).repeat(4, 1).cuda()
    net(torch.randn(256, 8, device="cuda"), offsets, numbers).mean().backward()
    optimizer.step()
""",
    )
    assert step.batch == 256
    alone = _run(
        tmp_path,
        """
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 8)
    def forward(self, samples, kind):
        return self.out(pad_sequence(samples, batch_first=True))
net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(5):
    samples = [torch.zeros(n, 8).cuda() for n in (5, 9, 7)]
    net(samples, torch.zeros(1, device="cuda")).mean().backward()
    optimizer.step()
""",
    )
    assert alone.batch == 3


def test_models_that_no_optimizer_steps_are_known_by_their_calls(tmp_path: Path) -> None:
    distilling = """
import torch
from torch import nn
teacher, net = nn.Linear(8, 8).cuda(), nn.Linear(8, 8).cuda()
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(net.parameters())
for _ in range(5):
    x = torch.randn(16, 8, device="cuda")
    aim = teacher(x).detach()
    loss = criterion(net(x), aim)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    program = _run(tmp_path, distilling).program
    assert program is not None
    called = [
        (each.call.partition(":")[2], each.beside.partition(":")[2], each.name) for each in program.models
    ]
    assert called == [("10:27", "6:46", "net"), ("9:20", "6:46", "teacher")]


def test_a_model_that_spawned_processes_share_is_trained_by_one_of_them(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(
        """
import torch

def work(net):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(9):
        net(torch.zeros(8, 64, device="cuda")).sum().backward()
        optimizer.step()
"""
    )
    step = _run(
        tmp_path,
        """
import torch
from torch import multiprocessing
from work import work

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    net = torch.nn.Linear(64, 64).cuda().share_memory()
    processes = [multiprocessing.Process(target=work, args=(net,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
""",
    )

    assert (step.settings.optimizer, step.batch) == ("sgd", 8)


def test_a_number_is_filled_in_where_a_mask_holds_without_asking_where(tmp_path: Path) -> None:
    """As in labels[labels == pad] = -100; what is a tensor of the GPU's goes to numbered places."""
    text = """
import torch
net = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    labels = torch.randint(0, 8, (4, 6), device="cuda")
    labels[labels == 3] = -100
    scores = net(torch.randn(4, 6, 8, device="cuda"))
    scores[labels == 4] = 0.0
    scores[:, torch.rand(6, device="cuda") > 0.5] = 1.0
    FILL
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    filled = _run(tmp_path, text.replace("FILL", ""))
    assert filled.program is not None
    assert filled.program.events == ()
    forward = [entry for entry in filled.ops if entry.name == "aten.masked_fill_"]
    assert [entry.inputs[0].shape for entry in forward] == [(4, 6), (4, 6, 8), (4, 6, 8)]
    placed = _run(tmp_path, text.replace("FILL", "scores[labels == 5] = scores.detach().sum()"))
    assert placed.program is not None
    # Forward, and in the backward pass: its gradient is zeroed in the same places.
    assert [event.name for event in placed.program.events] == ["nonzero"] * 2


_ACTOR = """
import torch
from torch import nn
from torch.distributions import Normal

agent = nn.Linear(4, 2).to("cuda")
optimizer = torch.optim.SGD(agent.parameters(), 1e-3)
states = torch.zeros(64, 4, device="cuda")
for update in range(4):
    with torch.no_grad():
        for time in range(20):
            actions = Normal(agent(states), 1.0).sample()
    for epoch in range(4):
        optimizer.zero_grad()
        (-Normal(agent(states), 1.0).log_prob(actions).mean()).backward()
        optimizer.step()
"""


def test_what_an_agent_does_between_updates_is_said_to_be_left_out(tmp_path: Path) -> None:
    step = _run(tmp_path, _ACTOR)
    assert any("20 times" in note and "train.py:12" in note for note in step.notes)
    assert not any("its models" in note for note in _run(tmp_path, _ACTOR.replace("(20)", "(3)")).notes)


def test_a_distribution_that_checks_its_arguments_waits_and_is_told_how_not_to(tmp_path: Path) -> None:
    step = _run(tmp_path, _ACTOR)
    assert step.program is not None
    assert Counter(event.name for event in step.program.events)["validate_args"] == 3  # two arguments, values
    (gpu,) = resolve("h100-sxm")
    found = Assessment(step, gpu).findings
    (reads,) = (each for each in found if each.code == "SYN001")
    assert "validate_args=False" in reads.fix
    assert "total +=" not in reads.fix
    unchecked = _run(tmp_path, _ACTOR.replace(", 1.0)", ", 1.0, validate_args=False)"))
    assert unchecked.program is not None
    assert {event.name for event in unchecked.program.events} == {"to"}  # the deviation, a number


def test_an_optimizer_that_loops_for_a_sparse_gradient_is_told_apart(tmp_path: Path) -> None:
    step = _run(
        tmp_path,
        """
import torch
from torch import nn

table = nn.EmbeddingBag(1000, 64, sparse=True, mode="sum")
net = nn.Sequential(table, *(nn.Linear(64, 64) for _ in range(8))).to("cuda")
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
for step in range(9):
    optimizer.zero_grad()
    net(torch.randint(0, 1000, (128, 4)).to("cuda")).sum().backward()
    optimizer.step()
""",
    )
    (gpu,) = resolve("h100-sxm")
    (loop,) = (each for each in Assessment(step, gpu).findings if each.code == "FOR001")
    assert "sparse gradient" in loop.fix


_EXTENDED = """
import torch
from torch import nn
from torch.utils import cpp_extension
from deepspeed.ops.adam.fused_adam import FusedAdam

try:
    cpp_extension.load("gelu", sources=["gelu.cpp", "gelu.cu"])
except ANY:
    pass
net = nn.Linear(64, 64).to("cuda")
optimizer = FusedAdam(net.parameters(), lr=1e-3, adam_w_mode=True, set_grad_none=True)
for step in range(9):
    optimizer.zero_grad()
    net(torch.randn(128, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_kernels_that_a_program_would_compile_are_pytorch_s_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's compiles one when it is made; who compiles others, and can do without them, does."""
    folder = tmp_path / "deepspeed" / "ops" / "adam"
    folder.mkdir(parents=True)
    (folder / "fused_adam.py").write_text("class FusedAdam:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    step = _run(tmp_path, _EXTENDED.replace("ANY", "Exception"))
    assert step.program is not None
    assert step.program.step.endswith("FusedAdam fused")
    with pytest.raises(TilefitError, match="the extension gelu would be compiled") as error:
        _run(tmp_path, _EXTENDED.replace("ANY", "KeyError"))
    assert error.value.where.endswith("train.py:8")


def test_an_evaluation_between_steps_that_goes_on_for_long_is_ended(tmp_path: Path) -> None:
    step = _run(
        tmp_path,
        """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

net = nn.Linear(8, 8).to("cuda")
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
loader = DataLoader(TensorDataset(torch.zeros(5, 8)))
validation = DataLoader(TensorDataset(torch.zeros(3000, 8)))
for number, (x,) in enumerate(loader):
    optimizer.zero_grad()
    net(x.to("cuda")).sum().backward()
    optimizer.step()
    if number == 0:
        net.eval()
        with torch.no_grad():
            for length, (x,) in enumerate(validation, 1):
                net(torch.zeros(length, 8, device="cuda"))
                time.sleep(0.1)
        net.train()
""",
    )
    assert step.program is not None
    assert step.program.steps == 3  # the loop that trains goes on
    assert any("were ended after some seconds" in note for note in step.notes)


def test_a_program_computes_on_one_thread(tmp_path: Path) -> None:
    check = "if torch.get_num_threads() > 1:\n        raise SystemExit('threads that wait for each other')\n"
    told = _TRAIN.replace("    import argparse\n", f"    import argparse\n    {check}")
    with patch.dict(os.environ, {"OMP_NUM_THREADS": "2"}):
        assert _run(tmp_path, told).ops


def test_where_the_loss_is_most_of_a_step_compiling_the_models_is_not_promised(tmp_path: Path) -> None:
    """As of an agent: what is sure is what `tilefit fix` can write."""
    text = """
import torch
layers = (part for _ in range(8) for part in (torch.nn.Linear(64, 64), torch.nn.ReLU()))
net = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(6):
    out, loss = net(torch.randn(4096, 64, device="cuda")), 0.0
    for _ in range({rounds}):
        loss = loss + (out * 2).tanh()
    optimizer.zero_grad()
    loss.mean().backward()
    optimizer.step()
"""
    found = {}
    for rounds in (1, 20):
        step = _run(tmp_path, text.format(rounds=rounds))
        assessment = Assessment(step, resolve("h100-sxm")[0], Selection())
        (found[rounds],) = (each for each in assessment.findings if each.code == "NTC001")
    assert (found[1].safety, found[20].safety) == ("safe", "advice")
    assert "what computes the loss" in found[20].fix


@pytest.mark.parametrize(("rounds", "second"), [(5, 100), (100, 5)])
def test_an_optimizer_that_may_step_later_is_waited_for_until_the_program_ends(
    tmp_path: Path, rounds: int, second: int
) -> None:
    text = f"""
import torch
nets = [torch.nn.Linear(64, 64).cuda() for _ in range(2)]
optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
for step in range({rounds}):
    for net, optimizer in zip(nets, optimizers):
        if net is nets[0] or step % {second} == {second} - 1:
            optimizer.zero_grad()
            net(torch.randn(32, 64, device="cuda")).mean().backward()
            optimizer.step()
"""
    step = _run(tmp_path, text)
    assert step.program is not None
    assert step.program.step.count("SGD") == (1 if rounds < second else 2)
    assert sum(entry.name == "aten.addmm" for entry in step.ops) == (1 if rounds < second else 6)


def test_a_teachers_average_is_beside_the_passes_though_the_teacher_runs_behind_it(tmp_path: Path) -> None:
    text = """
import copy, torch
student = torch.nn.Linear(64, 64).cuda()
teacher = copy.deepcopy(student)
optimizer = torch.optim.SGD(student.parameters(), 0.1)
for _ in range(4):
    x = torch.randn(32, 64, device="cuda")
    with torch.no_grad():
        wanted = teacher(x)
    (student(x) - wanted).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for a, b in zip(teacher.parameters(), student.parameters()):
            a.mul_(0.9).add_(b, alpha=0.1)
"""
    found = Counter(entry.name for entry in beside(_run(tmp_path, text).ops))
    assert found == {"aten.mul_": 2, "aten.add_": 2}
