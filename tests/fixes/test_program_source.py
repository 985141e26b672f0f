"""What is written into programs: each change as text, and when there is none."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilefit import gpus
from tilefit.capture.naming import program_file
from tilefit.cost.priced import resolve
from tilefit.fixes.changes.fix import RefusedError
from tilefit.fixes.source.loops import at_once
from tilefit.fixes.source.patches import texts_of
from tilefit.fixes.source.program import Files
from tilefit.fixes.source.training import WRITERS
from tilefit.ops import OPTIMIZER, Called, Fallback, HostEvent, Loader, Site, StepOp, Streaming
from tilefit.ops.program import TO_GPU, TO_HOST, WAIT, Program
from tilefit.options import ProgramOptions, Selection, TargetOptions
from tilefit.session.fixing import FixRequest, ProgramFixSession

_TRAIN = """\
import torch
from torch.utils.data import DataLoader

model = build().to(device)
optimizer = torch.optim.AdamW(
    model.parameters(), lr=1e-3
)
loader = DataLoader(data, batch_size=64)
torch.autograd.set_detect_anomaly(True)
total = 0.0
for x, y in loader:
    optimizer.zero_grad(set_to_none=False)
    x, y = x.to(device), y.to(device)
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    total += loss.item() * len(x)
    with torch.no_grad():
        for a, b in zip(averaged.parameters(), model.parameters()):
            a.data.mul_(decay).add_(b.data, alpha=1 - decay)
"""


def _at_once(loop: str) -> list[str]:
    (statement,) = ast.parse(loop).body
    assert isinstance(statement, ast.For)
    return [*at_once(statement)]


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


def end_of(text: str, part: str) -> str:
    """Line and column of where a call that begins so ends; empty where there is none."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and (ast.get_source_segment(text, node) or "").startswith(part):
            return f"{node.end_lineno}:{node.end_col_offset}"
    return ""


def written(folder: Path, code: str, text: str, at: str, **events: Any) -> tuple[str, str]:
    """The level of what answers a finding at the line that contains ``at``, and the changed text."""
    path = folder / "train.py"
    path.write_text(text)
    source = f"{path}:{line_of(text, at)}"
    copies = f"{path}:{line_of(text, 'x.to(device)')}" if "x.to(device)" in text else source
    trains = "torch.optim" in text
    program = Program(
        "train.py",
        "a batch",
        events=(
            HostEvent(3, TO_GPU, "to", Site("", copies), bytes=4096),
            HostEvent(9, WAIT, "item", Site("", f"{path}:{line_of(text, 'total +=')}")),
            *events.get("more", ()),
        ),
        loaders=(Loader(f"{path}:{line_of(text, 'DataLoader(data')}", 64, 0, False),),
        optimizers=(f"{path}:{line_of(text, 'torch.optim')}",) if trains else (),
        models=tuple(
            Called(f"{path}:{end}", *((f"{path}:{end_of(text, 'torch.optim')}", name) if name else ()))
            for call, name in (("model(", "model" if trains else ""), ("self.model(", ""), ("teacher(", ""))
            if (end := end_of(text, call))
        ),
    )
    update = Streaming("optimizer", 1024, 12288, 8192)
    unfused = StepOp(update, OPTIMIZER, Site(fallback=Fallback(1, update, "adamw")))
    context: Any = SimpleNamespace(
        step=SimpleNamespace(program=program, parameters={}, ops=(unfused,)), gpu=gpus.get("h200")
    )
    finding: Any = SimpleNamespace(code=code, source=source)
    change = WRITERS[code](finding, context, Files(path))
    return change.level, next(iter(texts_of([change]).values()))


def request_for(*codes: str) -> FixRequest:
    """To fix what rules find in ``train.py`` here."""
    return FixRequest(
        target="train.py",
        options=TargetOptions(),
        gpu=resolve("h200")[0],
        selection=Selection(select=codes),
        program=ProgramOptions("train.py"),
    )


@pytest.mark.parametrize(
    ("code", "at", "level", "old", "new"),
    [
        ("NTC003", "torch.optim", "safe", "lr=1e-3\n", "lr=1e-3, fused=True\n"),
        ("NTC001", "loss = model", "safe", "optimizer = t", "model.compile()\noptimizer = t"),
        ("ANO001", "anomaly", "unsafe", "anomaly(True)", "anomaly(False)"),
        ("SYN001", "total +=", "unsafe", "loss.item()", "loss.detach()"),
        (
            "FOR001",
            "a.data.mul_",
            "safe",
            "for a, b in zip(averaged.parameters(), model.parameters()):\n"
            "            a.data.mul_(decay).add_(b.data, alpha=1 - decay)",
            "torch._foreach_mul_([each.data for each in averaged.parameters()], decay)\n"
            "        torch._foreach_add_([each.data for each in averaged.parameters()], "
            "[each.data for each in model.parameters()], alpha=1 - decay)",
        ),
    ],
)
def test_a_change_is_written_where_the_program_was_seen(
    tmp_path: Path, code: str, at: str, level: str, old: str, new: str
) -> None:
    assert written(tmp_path, code, _TRAIN, at) == (level, _TRAIN.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("p for p in model.parameters()", "(p for p in model.parameters()), fused=True"),
        ("*groups", "*groups, fused=True"),
        ("groups,  # é, all", "groups, fused=True,  # é, all"),
        ("\n    groups,\n    lr=1e-3,\n", "\n    groups,\n    lr=1e-3,\n    fused=True,\n"),
        ("\n\tgroups,\n\t[{'lr': 1}]\n", "\n\tgroups,\n\t[{'lr': 1}],\n\tfused=True\n"),
    ],
)
def test_an_argument_is_added_as_the_others_are_written(tmp_path: Path, old: str, new: str) -> None:
    text = _TRAIN.replace("\n    model.parameters(), lr=1e-3\n", f"{old}\n" if "#" in old else old)
    _, changed = written(tmp_path, "NTC003", text, "torch.optim")
    assert changed == text.replace(old, new)


@pytest.mark.parametrize(
    ("value", "listed"),
    [
        ("b.data", "B"),
        (
            "decay * a.data + (1 - decay) * b.data",
            "torch._foreach_add(torch._foreach_mul(A, decay), torch._foreach_mul(B, 1 - decay))",
        ),
        ("(a.data - b.data) / decay", "torch._foreach_div(torch._foreach_sub(A, B), decay)"),
        ("decay - b.data", None),
        ("b.data * next(decays)", None),
        ("b.data ** 2", None),
    ],
)
def test_what_is_copied_into_each_parameter_is_computed_for_all(value: str, listed: str | None) -> None:
    loop = f"for a, b in zip(x.parameters(), y.parameters()):\n    a.data.copy_({value})"
    if listed is None:
        with pytest.raises(RefusedError):
            _at_once(loop)
        return
    a, b = (f"[each.data for each in {model}.parameters()]" for model in "xy")
    wanted = re.sub(r"\b[AB]\b", lambda name: a if name.group() == "A" else b, listed)
    (text,) = _at_once(loop)
    assert text == f"torch._foreach_copy_({a}, {wanted})"
    models = [torch.nn.Linear(3, 2) for _ in range(4)]
    for model, other in zip(models[:2], models[2:], strict=True):
        other.load_state_dict(model.state_dict())
    for code, (x, y) in ((loop, models[:2]), (text, models[2:])):
        exec(code, {"torch": torch, "x": x, "y": y, "decay": 0.3})
    assert all(map(torch.equal, models[0].parameters(), models[2].parameters()))


def test_weights_are_clamped_at_once() -> None:
    """As those of a critic of Wasserstein's."""
    loop = "for p in critic.parameters():\n    p.data.clamp_(-0.3, bound)"
    critics = [torch.nn.Linear(9, 9) for _ in range(2)]
    critics[1].load_state_dict(critics[0].state_dict())
    for code, critic in zip((loop, "\n".join(_at_once(loop))), critics, strict=True):
        exec(code, {"torch": torch, "critic": critic, "bound": 0.1})
    assert "_foreach_clamp_max_" in code
    assert all(map(torch.equal, *(critic.parameters() for critic in critics)))


_TRAINER = """\
import torch

class Trainer:
    def __init__(self, model, loader):
        self.model = model.to(device)
        self.optimizer = made(self.model, "torch.optim.AdamW")

    def run(self):
        for x, y in self.loader:
            loss = self.model(x, y)
            total += loss.item()

class Other:
    def __init__(self, model):
        self.net = model

loader = DataLoader(data)
"""


def test_a_model_of_a_class_is_compiled_where_its_constructor_names_it(tmp_path: Path) -> None:
    made = "        self.model = model.to(device)\n"
    level, text = written(tmp_path, "NTC001", _TRAINER, "torch.optim")
    assert (level, text) == ("safe", _TRAINER.replace(made, f"{made}        self.model.compile()\n"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.net = model", "self.model = model"),
        ("        self.model = model.to(device)\n", "        if device:\n            self.model = model\n"),
    ],
)
def test_a_model_that_a_class_may_name_elsewhere_is_left(tmp_path: Path, old: str, new: str) -> None:
    assert old in _TRAINER
    with pytest.raises(RefusedError, match="not made there"):
        written(tmp_path, "NTC001", _TRAINER.replace(old, new), "torch.optim")


def test_a_model_is_compiled_before_its_optimizer_is_returned(tmp_path: Path) -> None:
    function = "def made(model):\n    return torch.optim.AdamW(model.parameters())\n\n\nloss = model(0)\n"
    text = f"import torch\n\n\n{function}loader = DataLoader(data)\ntotal += 1\n"
    _, changed = written(tmp_path, "NTC001", text, "torch.optim")
    assert changed == text.replace("    return", "    model.compile()\n    return")


_EVALUATE = """\
import torch
from torch.utils.data import DataLoader

def main(arguments):
    model = build()
    model = model.to(device)
    loader = DataLoader(data, batch_size=64)
    total = 0
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            guess = model(x)
            total += (guess == y).sum().item()
    return total
"""


def test_where_nothing_is_trained_the_model_is_compiled_where_it_is_made(tmp_path: Path) -> None:
    made = "    model = model.to(device)\n"
    level, text = written(tmp_path, "NTC001", _EVALUATE, "guess =")
    assert (level, text) == ("safe", _EVALUATE.replace(made, f"{made}    model.compile()\n"))


def test_a_model_that_nobody_trains_is_compiled_as_well(tmp_path: Path) -> None:
    both = _TRAIN.replace("optimizer = torch", "teacher = build().to(device)\noptimizer = torch")
    both = both.replace("    loss = model(x, y)", "    target = teacher(x)\n    loss = model(x, target)")
    level, text = written(tmp_path, "NTC001", both, "torch.optim")
    made = "teacher = build().to(device)\n"
    expected = both.replace(made, f"{made}teacher.compile()\n")
    assert (level, text) == ("safe", expected.replace("optimizer = t", "model.compile()\noptimizer = t"))


def test_of_two_models_on_a_line_the_calls_are_told_apart(tmp_path: Path) -> None:
    both = _EVALUATE.replace("guess = model(x)", "guess = criterion(model(x))")
    both = both.replace("    total = 0\n", "    criterion = torch.nn.Softmax(-1)\n    total = 0\n")
    _, text = written(tmp_path, "NTC001", both, "guess =")
    made = "    model = model.to(device)\n"
    assert text == both.replace(made, f"{made}    model.compile()\n")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    model = build()\n    model = model.to(device)\n", ""),
        ("main(arguments):\n    model = build()\n    model = model.to(device)\n", "main(model):\n"),
        ("    model = model.to(device)\n", "    if arguments:\n        model = model.to(device)\n"),
        ("            guess", "            model = model.to(device)\n            guess"),
    ],
)
def test_a_model_of_unknown_origin_is_not_compiled(tmp_path: Path, old: str, new: str) -> None:
    with pytest.raises(RefusedError, match="not made there"):
        written(tmp_path, "NTC001", _EVALUATE.replace(old, new), "= model(")


def test_a_model_whose_call_was_not_seen_is_not_compiled(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="is not known"):
        written(tmp_path, "NTC001", _EVALUATE.replace("= model(", "= (model)("), "guess =")


def test_copies_of_batches_are_not_waited_for(tmp_path: Path) -> None:
    level, text = written(tmp_path, "SYN002", _TRAIN, "x.to(")
    assert level == "safe"
    assert "DataLoader(data, batch_size=64, pin_memory=True)" in text
    assert "x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)" in text


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("for x, y in loader:", "while True:\n    x, y = next(batches)"),
        lambda text: text.replace("    loss.backward()", "    loss.backward(); y.mul_(2)"),
        lambda text: text.replace("    loss.backward()", "    loss.backward(); torch.add(y, 1, out=y)"),
        lambda text: text.replace("    x, y = x.to", "    rows = x.numpy()\n    x, y = x.to"),
    ],
)
def test_a_copy_of_what_may_be_written_to_is_unsafe(tmp_path: Path, change: Any) -> None:
    assert written(tmp_path, "SYN002", change(_TRAIN), "x.to(")[0] == "unsafe"


@pytest.mark.parametrize(
    ("code", "at", "old", "new"),
    [
        ("NTC003", "torch.optim", "lr=1e-3", "**settings"),
        ("NTC003", "torch.optim", "lr=1e-3", "foreach=True"),
        ("FOR001", "a.data.mul_", "alpha=1 - decay", "alpha=a.numel()"),
        ("FOR001", "a.data.mul_", "alpha=1 - decay", "alpha=random.random()"),
        ("FOR001", "a.data.mul_", "(decay)", "(next(decays))"),
        ("FOR001", "a.data.mul_", "averaged.parameters()", "averaged"),
        ("FOR001", "a.data.mul_", "averaged.parameters()", "next(averaged).parameters()"),
        ("FOR001", "a.data.mul_", "a.data.mul_(decay)", "a.data.mul_(decay).bernoulli_()"),
        ("SYN001", "total +=", "total += loss.item() * len(x)", "log(total); total += len(x)"),
        ("SYN001", "total +=", "total += loss.item()", "total += [loss.item()]"),
        ("SYN001", "total +=", "total += loss.item()", "total += math.exp(loss.item())"),
        ("SYN002", "x.to(", "batch_size=64", "**options"),
        ("ANO001", "anomaly", "set_detect_anomaly(True)", "set_detect_anomaly(debug)"),
    ],
)
def test_what_is_not_certain_is_left_to_the_user(
    tmp_path: Path, code: str, at: str, old: str, new: str
) -> None:
    text = _TRAIN.replace(old, new)
    with pytest.raises(RefusedError):
        written(tmp_path, code, text, at if at in text else new.split("(")[0])


def test_a_line_that_also_copies_to_the_host_is_left_alone(tmp_path: Path) -> None:
    site = Site("", f"{tmp_path / 'train.py'}:{line_of(_TRAIN, 'x.to(device)')}")
    with pytest.raises(RefusedError, match="not clear which calls"):
        written(tmp_path, "SYN002", _TRAIN, "x.to(", more=(HostEvent(4, TO_HOST, "to", site, bytes=4),))


def test_a_module_begins_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package" / "sub").mkdir(parents=True)
    assert program_file("package.train", True) == tmp_path / "package" / "train.py"
    assert program_file("package.sub", True) == tmp_path / "package" / "sub" / "__main__.py"


def test_a_model_that_compile_would_leave_as_it_is_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("""\
import torch

layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(8)]
net = torch.nn.Sequential(*layers).to("cuda")
optimizer = torch.optim.Adam(net.parameters())
for _ in range(4):
    net(torch.randn(8, 256, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""")
    request = request_for("NTC001")
    session = ProgramFixSession(request)
    assert session.patches.made == ()
    (left,) = session.patches.by_hand
    assert "torch.compile(model) does" in left.reason


def test_a_changed_program_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = """\
import torch

layers = [torch.nn.Linear(256, 256) for _ in range(8)]
net = torch.nn.Sequential(*layers).to("cuda")
optimizer = torch.optim.Adam(net.parameters())
for _ in range(4):
    net(torch.randn(8, 256, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    Path("train.py").write_text(text)
    request = request_for("NTC003")
    session = ProgramFixSession(request)
    (patch,) = session.patches.made
    assert (patch.code, patch.level, patch.where) == ("NTC003", "safe", "train.py:5")
    assert patch.gain_s > 0
    assert [*session.patches.texts().values()] == [text.replace("parameters())", "parameters(), fused=True)")]
    outcome = session.outcome(source_wanted=True)
    assert outcome.exit_code == 1
    assert not outcome.left
    assert Path("train.py").read_text() == text


_BLOCKS = """\
import torch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)

    def forward(self, x):
        y = self.layer(x)
        return x + y * torch.sigmoid(1.7 * y) + 0.1 * torch.tanh(y)


class Net(torch.nn.Module):
    def __init__(self, blocks=6):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

"""
_STEPS = """
for _ in range(4):
    optimizer.zero_grad()
    loss(torch.randn(4096, 256, device="cuda")).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("made", "before", "compiled"),
    [
        (
            """
class Unbound:
    def __getattribute__(self, name):
        raise RuntimeError("not bound yet")


unbound = Unbound()


def grouped(module):
    return [{"params": [p]} for p in module.parameters()]


net = Net().to("cuda")
loss = lambda x: net(x).square().mean()
optimizer = torch.optim.SGD(grouped(net), lr=0.1)
""",
            "optimizer = torch",
            "net",
        ),
        (
            """
class Task(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.head = Net(), Net(3)

    def loss(self, x):
        return self.head(self.net(x)).square().mean()

    def optimizer(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


task = Task().to("cuda")
loss, optimizer = task.loss, task.optimizer()
""",
            "return torch",
            "self.head self.net",
        ),
        (
            """
class Adversaries(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = Net(), Net()

    def forward(self, x):
        return self.generator(x)


models = Adversaries().to("cuda")
optimizer = torch.optim.SGD(models.parameters(), lr=0.1)
loss = lambda x: models.critic(models(x)).square().mean()
""",
            "optimizer = torch",
            "models models.critic",
        ),
        (
            """
class Trainer:
    def __init__(self):
        self.nets = torch.nn.ModuleList([Net(), Net()]).to("cuda")
        parameters = [p for net in self.nets for p in net.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)

    def loss(self, x):
        return sum(net(x).square().mean() for net in self.nets)


trainer = Trainer()
loss, optimizer = trainer.loss, trainer.optimizer
""",
            "self.optimizer = torch",
            "self.nets[1] self.nets[0]",
        ),
        (
            """
net = Net().to("cuda")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
wrapped = torch.nn.DataParallel(net)
loss = lambda x: wrapped(x).square().mean()
""",
            "optimizer = torch",
            "net",
        ),
    ],
)
def test_the_models_that_are_called_are_compiled_where_the_optimizer_is_made(
    made: str, before: str, compiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever way their parameters take to it."""
    monkeypatch.chdir(tmp_path)
    text = _BLOCKS + made + _STEPS
    Path("train.py").write_text(text)
    patches = ProgramFixSession(request_for("NTC001")).patches
    assert [patch.level for patch in patches.made] == ["safe"]
    (line,) = (line for line in text.splitlines() if before in line)
    indentation = line[: -len(line.lstrip())]
    added = "".join(f"{indentation}{name}.compile()\n" for name in compiled.split())
    assert [*patches.texts().values()] == [text.replace(line, f"{added}{line}")]


def test_what_a_step_does_beside_its_passes_is_not_for_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("""\
import copy

import torch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)

    def forward(self, x):
        y = self.layer(x)
        return x + y * torch.sigmoid(1.7 * y) + 0.1 * torch.tanh(y)


net = torch.nn.Sequential(*(Block() for _ in range(8))).to("cuda")
averaged = copy.deepcopy(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    net(torch.randn(4096, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        for mean, p in zip(averaged.parameters(), net.parameters()):
            mean.copy_(0.9 * mean + 0.1 * p.cos())
""")
    request = request_for("NTC001", "FOR001")
    session = ProgramFixSession(request)
    (patch,) = session.patches.made
    findings = {finding.code: finding for finding in session.assessment.findings}
    assert (patch.code, patch.where) == ("NTC001", "train.py:18")
    assert patch.gain_s == pytest.approx(findings["NTC001"].gain_s, rel=0.02)
    assert {each.reason for each in session.patches.by_hand} == {"what it adds depends on each tensor"}


def test_an_optimizer_that_cannot_be_fused_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("""\
import torch

table = torch.nn.Embedding(1000, 1024, sparse=True).to("cuda")
net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to("cuda")
rows = torch.optim.SGD(table.parameters(), lr=0.1)
weights = torch.optim.AdamW(net.parameters())
for _ in range(4):
    net(table(torch.randint(1000, (8,), device="cuda"))).mean().backward()
    rows.step()
    weights.step()
    rows.zero_grad()
    weights.zero_grad()
""")
    request = request_for("NTC003")
    ((text,),) = [[*ProgramFixSession(request).patches.texts().values()]]
    assert "AdamW(net.parameters(), fused=True)" in text
    assert "SGD(table.parameters(), lr=0.1)\n" in text
