"""Checkpointing that is written into programs: which modules, how they are named, and the same training."""

from __future__ import annotations

import copy
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilefit.capture.child import capture_target
from tilefit.capture.torchvision_import import tolerated
from tilefit.cost import estimate_step
from tilefit.cost.priced import resolve
from tilefit.fixes.changes.fix import RefusedError
from tilefit.fixes.source.checkpoint import _named, ways
from tilefit.fixes.source.patches import Patches, texts_of
from tilefit.fixes.source.program import Files, Loaded
from tilefit.options import ProgramOptions, Selection, TargetOptions
from tilefit.rules.base import Context
from tilefit.session.fixing import FixRequest, ProgramFixSession

GPU = resolve("h100")[0]

_OWN = """\
\"\"\"A program.\"\"\"

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def main(device, batch):
    torch.manual_seed(0)
    losses = []
    model = Net(256, 6).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        checkpoint = torch.randn(batch, 64, 256, device=device)
        loss = model(checkpoint).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return model, losses


if __name__ == "__main__":
    main("cuda", 256)
"""

_TRANSFORMERS = """\
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def main(device, batch):
    torch.manual_seed(0)
    losses = []
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=64, n_head=2, vocab_size=100)).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        ids = torch.randint(100, (batch, 64), device=device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return model, losses


if __name__ == "__main__":
    main("cuda", 512)
"""


def _fixed(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, share: float) -> tuple[Patches, float]:
    """What is written into a program that may take a share of its memory, and that budget."""
    monkeypatch.chdir(folder)
    Path("train.py").write_text(text)
    request = FixRequest(
        target="train.py",
        options=TargetOptions(),
        gpu=GPU,
        selection=Selection(select=("checkpoint",)),
        program=ProgramOptions("train.py"),
    )
    session = ProgramFixSession(request)
    budget = share * session.assessment.step.memory.peak_bytes
    object.__setattr__(request, "memory_bytes", budget)
    return session.patches, budget


def _trained(text: str) -> list[torch.Tensor]:
    """Losses and parameters of a program that is run on the CPU."""
    names: dict[str, Any] = {"__name__": "program"}
    with tolerated():  # importing a torchvision of another build
        exec(compile(text, "train.py", "exec"), names)
    model, losses = names["main"]("cpu", 4)
    return [*losses, *model.parameters()]


_WRITTEN = """\
    model = Net(256, 6).to(device)
    for layer in model.blocks[:4]:
        layer.forward = functools.partial(
            torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False
        )
"""
_ENABLED = """\
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.transformer.h[N:]:
        layer.gradient_checkpointing = False
"""


def test_blocks_of_a_program_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patches, _ = _fixed(tmp_path, monkeypatch, _OWN, 0.65)
    (patch,) = patches.made
    assert (patch.code, patch.level) == ("BAT002", "safe")
    assert patch.gain_s < 0
    assert "at once, not" in patch.note
    (text,) = patches.texts().values()
    assert text == _OWN.replace("import torch\n", "import functools\nimport torch\n", 1).replace(
        "    model = Net(256, 6).to(device)\n", _WRITTEN
    )
    expected, found = _trained(_OWN), _trained(text)
    assert all(map(torch.equal, expected, found))
    assert not patches.too_large


def test_a_librarys_model_is_told_and_only_for_the_layers_that_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches, _ = _fixed(tmp_path, monkeypatch, _TRANSFORMERS, 0.8)
    (text,) = patches.texts().values()
    made = next(line for line in _TRANSFORMERS.splitlines(keepends=True) if "model = GPT2" in line)
    (kept,) = re.findall(r"transformer.h\[(\d):]", text)
    assert 1 <= int(kept) < 4
    assert text == _TRANSFORMERS.replace(made, made + _ENABLED.replace("N", kept))
    expected, found = _trained(_TRANSFORMERS), _trained(text)
    assert all(map(torch.equal, expected, found))


def test_what_cannot_be_met_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patches, _ = _fixed(tmp_path, monkeypatch, _OWN, 0.05)
    assert not patches.made
    assert "frees enough" in patches.too_large


def test_a_changed_model_is_copied_saved_and_compiled() -> None:
    names: dict[str, Any] = {"__name__": "program"}
    exec(
        compile(_OWN.replace("import torch\n", "import functools\nimport torch\n", 1), "t.py", "exec"), names
    )
    model = names["Net"](16, 2).eval()
    plain = model(x := torch.randn(3, 16))
    loop = "\n".join(line[4:] for line in _WRITTEN.splitlines()[1:])
    exec(loop, {**names, "model": model})
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.blocks[0].up.weight.zero_()
    assert torch.equal(other(x), plain)
    assert not torch.equal(model(x), plain)
    assert [*other.state_dict()] == [*names["Net"](16, 2).state_dict()]
    compiled: Any = torch.compile(other, backend="aot_eager")
    found = compiled(x)
    found.sum().backward()
    assert torch.allclose(found, plain)
    buffer = io.BytesIO()
    torch.save(other.state_dict(), buffer)


# ---- how modules are named ---------------------------------------------------------------------

_MODULES = {
    "": "Net",
    "a": "ModuleList",
    **{f"a.{n}": "Block" for n in range(5)},
    "a.1.mlp": "MLP",
    "b": "ModuleDict",
    "b.x-y": "Block",
    "head": "Linear",
}


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        (["a.0", "a.1", "a.2", "a.3", "a.4"], "m.a"),
        (["a.0", "a.1"], "m.a[:2]"),
        (["a.3", "a.4"], "m.a[3:]"),
        (["a.1", "a.2"], "m.a[1:3]"),
        (["a.0", "a.2", "a.3"], "(*m.a[:1], *m.a[2:4])"),
        (["head"], "(m.head,)"),
        (["a.0", "a.1.mlp", "head"], "(*m.a[:1], m.a[1].mlp, m.head)"),
        (["b.x-y"], '(m.get_submodule("b.x-y"),)'),
    ],
)
def test_modules_are_named_as_one_would(paths: list[str], text: str) -> None:
    assert _named("m", paths, _MODULES) == text


# ---- targets that build a model ----------------------------------------------------------------


def _of_factory(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, share: float = 0.65) -> str:
    """The file of a factory whose model may take a share of its memory, with the first change."""
    monkeypatch.chdir(folder)  # what else this process has imported is no file of the program's
    path = folder / "factory.py"
    path.write_text(text)
    target, options = f"{path}:build", TargetOptions()
    step = capture_target(target, options)
    context = Context(step, GPU, estimate_step(step, GPU))
    program = Loaded(target, options)
    for way in ways(context, share * step.memory.peak_bytes, program):
        for change in way:
            return texts_of([change]).popitem()[1]
    return ""


_CLASSES = _OWN[: _OWN.index("def main")]
_BUILD = f"{_CLASSES}\ndef build():\n    model = Net(64, 6)\n    return model, torch.empty(4096, 64)\n"


def test_a_factorys_model_is_changed_where_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = _of_factory(tmp_path, monkeypatch, _BUILD)
    assert "    model = Net(64, 6)\n    for layer in model.blocks[:" in text


def test_statistics_of_batches_are_not_learnt_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = _BUILD.replace("nn.LayerNorm", "nn.BatchNorm1d")
    assert _of_factory(tmp_path, monkeypatch, text) == ""


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("x = block(x)", "x = block(x=x)", "by keywords alone"),
        (
            "    model = Net(64, 6)\n    return model, ",
            "    return Net(64, 6), ",
            "is given no name",
        ),
    ],
)
def test_what_is_not_certain_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, reason: str
) -> None:
    assert old in _BUILD
    with pytest.raises(RefusedError, match=reason):
        _of_factory(tmp_path, monkeypatch, _BUILD.replace(old, new))


def test_a_trainer_is_told_by_its_arguments(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    text = "from transformers import Trainer, TrainingArguments\n\nargs = TrainingArguments({})\n"
    path.write_text(text.format('output_dir="out"'))
    (way,) = ways(SimpleNamespace(step=None), 0.0, Files(path))  # type: ignore[arg-type]
    (change,) = way
    told = 'gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}'
    assert texts_of([change]).popitem()[1] == text.format(f'output_dir="out", {told}')
    path.write_text(text.format("**settings"))
    with pytest.raises(RefusedError, match="may say it already"):
        list(ways(SimpleNamespace(step=None), 0.0, Files(path)))  # type: ignore[arg-type]
