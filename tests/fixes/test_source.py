"""Source patches: the right literal, nothing else, and nothing where it is not clear."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tilefit import gpus, rules
from tilefit.capture.child import capture_target
from tilefit.cost import estimate_step
from tilefit.cost.priced import resolve
from tilefit.errors import UsageError
from tilefit.fixes.changes.fix import RefusedError
from tilefit.fixes.source.file import Edit, SourceFile
from tilefit.fixes.source.patches import ByHand, Patches, Trial, propose
from tilefit.fixes.source.program import Files
from tilefit.fixes.source.training import WRITERS_OF_LOADED
from tilefit.ops import Step
from tilefit.options import Selection, TargetOptions
from tilefit.rules.base import Context
from tilefit.session.fixing import FixRequest, FixSession

Proposed = Callable[..., Patches]


@pytest.fixture
def proposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proposed:
    """Writes a program and proposes patches for it; changed programs are tried in this process."""
    monkeypatch.chdir(tmp_path)

    def captured(target: str, options: TargetOptions) -> Step:
        precision = torch.get_float32_matmul_precision()
        try:
            _forget(tmp_path)  # a child has imported nothing yet
            return capture_target(target, options)
        finally:
            torch.set_float32_matmul_precision(precision)  # what a program sets dies with the child

    def run(
        text: str | None,
        factory: str = "build",
        *,
        select: Sequence[str] = (),
        safe: bool = False,
        **how: object,
    ) -> Patches:
        path = tmp_path / "script.py"
        if text is not None:
            path.write_bytes(text.encode())
        target = f"{path}:{factory}"
        options = TargetOptions(**{"amp": "bf16", **how})  # type: ignore[arg-type]
        step, gpu = captured(target, options), gpus.get("h200")
        context = Context(step, gpu, estimate_step(step, gpu))
        levels = ("safe",) if safe else ("safe", "unsafe")

        def find(context: Context) -> list[rules.Finding]:
            return rules.run(context.step, gpu, context.estimate, select=select, min_gain=0.001)

        def changed(sources: Mapping[str, str]) -> Step:
            return captured(target, replace(options, sources=sources))

        return propose(context, Trial(WRITERS_OF_LOADED, Files.of(step, path), changed, find, levels))

    return run


def _forget(folder: Path) -> None:
    """Forget the modules of a folder's files."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


def _changed(patches: Patches) -> list[str]:
    """The lines a diff removes and adds."""
    return [
        line
        for line in patches.diff().decode().splitlines()
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]


def _only(patches: Patches) -> ByHand:
    assert not patches.made
    (by_hand,) = patches.by_hand
    return by_hand


# ---- files -------------------------------------------------------------------------------------

_FILES = {
    "unix": b"import torch\nx = f(4095)  # odd\n",
    "windows": b"import torch\r\nx = f(4095)  # odd\r\n",
    "mixed line ends": b"import torch\r\nx = f(4095)  # odd\ny = 2\r\n",
    "no last newline": b"x = f(4095)",
    "tabs and trailing space": b"def g():\n\tif 1:\n\t\treturn f( 4095 , )  \t \n\t# end\n",
    "byte order mark": b"\xef\xbb\xbfx = f(4095)\n",
    "latin-1": b"# -*- coding: latin-1 -*-\nn = '\xe9\xe8'; x = f('\xe9', 4095)\n",
    "form feed": b"import torch\n\x0c\nx = f(4095)\n",
    "wide characters": "s = '😀é'; x = f('日本', 4095)  # ﬀ\n".encode(),
    "line separator in a string": "s = 'a\u2028b\x0bc'\nx = f(4095)\n".encode(),
    "continued": b"x = g(0) \\\n  .f(\\\n 4095)\n",
}


@pytest.mark.parametrize("data", _FILES.values(), ids=_FILES)
def test_a_literal_is_replaced_and_every_other_byte_stays(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_bytes(data)
    file = SourceFile.read(path)
    (edit,) = _replaced(file, "4096")
    file.write(file.with_edits([edit]))
    assert path.read_bytes() == data.replace(b"4095", b"4096")


@pytest.mark.parametrize("data", _FILES.values(), ids=_FILES)
def test_the_diff_is_a_patch_that_git_applies_and_takes_back(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file.py"
    path.write_bytes(data)
    file = SourceFile.read(path)
    diff = b"# words before it\n" + file.diff(file.text.replace("4095", "4096"))
    _git_apply(diff)
    assert path.read_bytes() == data.replace(b"4095", b"4096")
    _git_apply(diff, "--reverse")
    assert path.read_bytes() == data


def _git_apply(diff: bytes, *options: str) -> None:
    command = ["git", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", *options]
    subprocess.run(command, input=diff, check=True)


def _replaced(file: SourceFile, text: str) -> list[Edit]:
    """The edits that write ``text`` in the place of each 4095."""
    return [file.replaced(node, text) for node in file.all(ast.Constant) if node.value == 4095]


_LINES = st.sampled_from(
    [
        "x = f(4095)",
        "x = f( 4095,)  # 4095 in words",
        "\tz = 1  ",
        "if True:",
        "    y = (4095, 'é😀',",
        "      2)",
        '    s = """',
        "  4095  ",
        '"""',
        "# comment \t",
        "",
        "   ",
        "class A:\n\tn = 4095",
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(_LINES, max_size=8),
    ends=st.lists(st.sampled_from(["\n", "\r\n"]), min_size=9, max_size=9),
    mark=st.booleans(),
    last=st.booleans(),
)
@example(lines=["x = f(4095)"], ends=["\r\n"] * 9, mark=True, last=False)
@example(lines=["x = f(4095)", "", "   "], ends=["\n"] * 9, mark=False, last=False)
def test_whatever_the_file_looks_like_edits_can_be_taken_back(
    tmp_path: Path, lines: list[str], ends: list[str], mark: bool, last: bool
) -> None:
    text = "".join(line + end for line, end in zip(lines, ends, strict=False))
    text = text if last else text.rstrip("\r\n")
    data = text.encode("utf-8-sig" if mark else "utf-8")
    path = tmp_path / "file.py"
    path.write_bytes(data)
    try:
        file = SourceFile.read(path)
    except RefusedError:
        with pytest.raises(SyntaxError):
            compile(data, "file.py", "exec")
        return
    edits = sorted(_replaced(file, "16384"), key=lambda edit: edit.start)
    changed = file.with_edits(edits)
    assert changed.count("16384") == len(edits)
    file.write(changed)
    after = SourceFile.read(path)
    moved = [Edit(after, e.start + i, e.stop + i + 1, "4095") for i, e in enumerate(edits)]
    after.write(after.with_edits(moved))
    assert path.read_bytes() == data


def test_a_file_that_changed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text("x = 4095\n")
    file = SourceFile.read(path)
    path.write_text("x = 4095  # mine\n")
    with pytest.raises(UsageError, match="changed while"):
        file.write("x = 4096\n")
    assert path.read_text() == "x = 4095  # mine\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link_and_permissions_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "file.py", tmp_path / "link.py"
    path.write_text("x = 1\n")
    path.chmod(0o754)
    link.symlink_to(path)
    SourceFile.read(link).write("x = 2\n")
    assert link.is_symlink()
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("x = 2\n", 0o754)


def test_a_file_python_cannot_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_bytes(b"x = '\xff'\n")
    with pytest.raises(RefusedError, match="cannot be read"):
        SourceFile.read(path)


_HEAD = "import torch\nfrom torch import nn\n"
_NET = """
class Net(nn.Module):
    def __init__(self, hidden=512):
        super().__init__()
        self.up, self.down = nn.Linear(2048, hidden), nn.Linear(hidden, 2048)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
"""
_X = "torch.empty(16384, 2048)"


def test_a_file_outside_the_project_is_left_alone(
    proposed: Proposed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "site-packages"
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    for folder, name in ((library, "a_library"), (elsewhere, "a_neighbour")):
        folder.mkdir()
        (folder / f"{name}.py").write_text(
            "import torch\n\ndef adamw(net):\n    return torch.optim.AdamW(net.parameters())\n"
        )
        monkeypatch.syspath_prepend(folder)
    for name, reason in (
        ("a_library", "a_library.py:4 is no file of yours"),
        ("a_neighbour", "lies outside the project"),
    ):
        made = "adamw(net)"
        text = _LOOP.replace("torch.optim.AdamW(net.parameters(), lr=1e-3)", made)
        assert made in text
        text = f"{_HEAD}from {name} import adamw\n{text}"
        assert reason in _only(proposed(text, select=["NTC003"], amp="")).reason


# ---- settings ----------------------------------------------------------------------------------

_CONV = "nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3))"
_IMAGES = "torch.empty(256, 64, 112, 112)"


@pytest.mark.parametrize(
    ("head", "name"),
    [("import torch\nfrom torch import nn\n", "torch"), ("import torch as th\nfrom torch import nn\n", "th")],
    ids=["torch", "th"],
)
def test_channels_last_follows_the_model(proposed: Proposed, head: str, name: str) -> None:
    images = _IMAGES.replace("torch", name)
    text = f"{head}\ndef build():\n    net = {_CONV}  # net\n    return net, {images}\n"
    patches = proposed(text, select=["LAY001"], safe=True)
    assert _changed(patches) == [f"+    net.to(memory_format={name}.channels_last)"]
    assert f"# net\n+    net.to(memory_format={name}" in patches.diff().decode()


def test_a_model_without_a_name_is_left_alone(proposed: Proposed) -> None:
    text = f"{_HEAD}\ndef build():\n    return {_CONV}, {_IMAGES}\n"
    assert "is given no name" in _only(proposed(text, select=["LAY001"])).reason


def test_of_a_function_the_model_is_laid_out_before_its_optimizer(proposed: Proposed) -> None:
    text = (
        f"{_HEAD}\ndef build():\n    net = {_CONV}\n    sgd = torch.optim.SGD(net.parameters(), lr=0.1)\n\n"
        f"    def step():\n        net({_IMAGES}).sum().backward()\n        sgd.step()\n\n    return step\n"
    )
    patches = proposed(text, select=["LAY001"], safe=True, amp="")
    assert _changed(patches) == ["+    net.to(memory_format=torch.channels_last)"]
    assert b"channels_last)\n     sgd = " in patches.diff()


def test_torch_is_imported_where_it_is_not(proposed: Proposed) -> None:
    text = (
        '"""Words."""\n\nfrom __future__ import annotations\n\nfrom torch import empty, nn\n\n'
        f"def build():\n    net = {_CONV}\n    return net, empty(256, 64, 112, 112)\n"
    )
    lines = _changed(proposed(text, select=["LAY001"]))
    assert lines == ["+import torch", "+    net.to(memory_format=torch.channels_last)"]


_LOOP = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048))

    def forward(self, x):
        return self.layers(x)

def build():
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def step():
        x = torch.zeros(8192, 2048)
        y = net(x)
        # the loss
        text = '''
    kept
'''
        loss = y.square(
        ).mean()
        done = True
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
"""


def test_autocast_surrounds_forward_and_loss(proposed: Proposed) -> None:
    patches = proposed(_HEAD + _LOOP, select=["PRC002"], amp="")
    assert _changed(patches) == [
        "-        y = net(x)",
        "-        # the loss",
        "-        text = '''",
        '+        with torch.autocast("cuda", dtype=torch.bfloat16):',
        "+            y = net(x)",
        "+            # the loss",
        "+            text = '''",
        # What is inside the string stays where it is.
        "-        loss = y.square(",
        "-        ).mean()",
        "+            loss = y.square(",
        "+            ).mean()",
    ]


def test_the_optimizer_is_fused_where_it_is_made(proposed: Proposed) -> None:
    patches = proposed(_HEAD + _LOOP, select=["NTC003"], amp="")
    assert _changed(patches) == [
        "-    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)",
        "+    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)",
    ]


def test_every_optimizer_of_the_step_is_fused(proposed: Proposed) -> None:
    text = """
def build():
    a, b = nn.Linear(2048, 2048), nn.Linear(2048, 2048)
    first = torch.optim.Adam(a.parameters())
    second = torch.optim.Adam(b.parameters(), fused=False)
    third = torch.optim.RMSprop(nn.Linear(8, 8).parameters())

    def step():
        (a(torch.zeros(64, 2048)).mean() + b(torch.zeros(64, 2048)).mean()).backward()
        first.step()
        second.step()

    return step
"""
    assert _changed(proposed(_HEAD + text, select=["NTC003"], amp="")) == [
        "-    first = torch.optim.Adam(a.parameters())",
        "-    second = torch.optim.Adam(b.parameters(), fused=False)",
        "+    first = torch.optim.Adam(a.parameters(), fused=True)",
        "+    second = torch.optim.Adam(b.parameters(), fused=True)",
    ]


def test_tf32_is_allowed_behind_the_imports(proposed: Proposed) -> None:
    patches = proposed(_HEAD + _LOOP, select=["PRC001"], amp="")
    assert _changed(patches) == ["+", '+torch.set_float32_matmul_precision("high")']
    assert patches.diff().index(b"from torch import nn") < patches.diff().index(b"+torch.set_float32")


def test_a_loop_that_was_not_run_is_not_guessed_at(proposed: Proposed) -> None:
    # Of a target that is a model nobody has seen who trains it.
    text = _HEAD + _LOOP.partition("    optimizer =")[0] + f"    return net, {_X}\n"
    loop = "\ndef train(net):\n    torch.optim.AdamW(net.parameters())\n    net(1).sum().backward()\n"
    patches = proposed(text + loop, select=["PRC002", "NTC003"], amp="")
    assert not patches.made
    assert {each.finding.code for each in patches.by_hand} == {"PRC002", "NTC003"}
    assert all("is not known: none was run" in each.reason for each in patches.by_hand)


def test_changes_save_on_top_of_each_other(proposed: Proposed, tmp_path: Path) -> None:
    patches = proposed(_HEAD + _LOOP, select=["PRC001", "PRC002", "NTC003"], amp="")
    # Under autocast no product is left to TF32.
    assert [patch.code for patch in patches.made] == ["PRC002", "NTC003"]
    gpu, target = gpus.get("h200"), f"{tmp_path / 'script.py'}:build"
    before = estimate_step(capture_target(target, TargetOptions()), gpu).time_s
    patches.write()
    _forget(tmp_path)
    after = estimate_step(capture_target(target, TargetOptions()), gpu).time_s
    assert sum(patch.gain_s for patch in patches.made) == pytest.approx(before - after)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("loss.backward()", "pass", "no backward() in the same block"),
        (
            "y = net(x)\n",
            "loss = net(x).mean(); loss.backward(); y = net(x)\n",
            "share",
        ),
        ("y = net(x)\n", "y = net(x); z = y\n", None),
    ],
)
def test_autocast_needs_a_block_of_its_own(
    proposed: Proposed, old: str, new: str, reason: str | None
) -> None:
    text = _LOOP.replace("loss.backward()", "pass") if "share" in str(reason) else _LOOP
    assert old in text
    patches = proposed(_HEAD + text.replace(old, new), select=["PRC002"], amp="")
    if reason is None:
        assert patches.made
    else:
        assert reason in _only(patches).reason


def test_foreach_is_the_users_word(proposed: Proposed) -> None:
    text = _LOOP.replace("lr=1e-3", "lr=1e-3, foreach=True")
    assert "foreach=True" in _only(proposed(_HEAD + text, select=["NTC003"], amp="")).reason


def test_unsafe_changes_are_only_named_unless_asked_for(proposed: Proposed) -> None:
    patches = proposed(_HEAD + _LOOP, select=["PRC001"], amp="", safe=True)
    reason = _only(patches).reason
    assert reason.endswith('matmul_precision("high") in script.py:4 is unsafe: --level unsafe')


def test_a_change_that_breaks_the_program_is_not_made(proposed: Proposed) -> None:
    text = _LOOP.replace(
        "        y = net(x)\n", "        y = net(x)\n        assert y.dtype == torch.float32\n"
    )
    by_hand = _only(proposed(_HEAD + text, select=["PRC002"], amp=""))
    assert "does not run with with torch.autocast" in by_hand.reason


# ---- all together ------------------------------------------------------------------------------


def test_a_second_write_finds_nothing(proposed: Proposed, tmp_path: Path) -> None:
    first = proposed(_HEAD + _LOOP, select=["PRC002", "NTC003"], amp="")
    assert {patch.code for patch in first.made} == {"PRC002", "NTC003"}
    assert first.write() == ["script.py"]
    written = (tmp_path / "script.py").read_bytes()
    again = proposed(None, select=["PRC002", "NTC003"], amp="")
    assert not again.made
    assert again.write() == []
    assert (tmp_path / "script.py").read_bytes() == written


def test_no_line_of_the_user_builds_a_class_that_is_the_target(tmp_path: Path) -> None:
    # The command line that names it is none.
    path = tmp_path / "a_class.py"
    path.write_text(_HEAD + _NET)
    step = capture_target(f"{path}:Net", TargetOptions(input=("float32[8,2048]",)))
    assert not Files.of(step, path).built_at


def test_no_line_of_the_user_builds_a_model_of_a_library() -> None:
    assert not Files.of(capture_target("torchvision:alexnet", TargetOptions(batch=1)), Path()).built_at


def test_a_function_is_brought_into_no_budget(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(_HEAD + _LOOP)
    request = FixRequest(
        target=f"{path}:build",
        options=TargetOptions(),
        gpu=resolve("h200")[0],
        selection=Selection(),
        memory_bytes=2**30,
    )
    with pytest.raises(UsageError, match="is a function") as error:
        _ = FixSession(request).plan
    assert "--memory-budget" in error.value.hint


def test_a_function_that_names_the_device_is_fixed_and_not_run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    text = _HEAD + _LOOP.replace("net = Net()", "net = Net().cuda()").replace(
        "2048)\n        y", "2048).cuda()\n        y"
    )
    (tmp_path / "package" / "script.py").write_text(text)
    session = FixSession(
        FixRequest(
            target="package.script:build",
            options=TargetOptions(),
            gpu=resolve("h200")[0],
            selection=Selection(select=("NTC003",)),
        )
    )
    assert session.plan is None
    assert _changed(session.patches) == [
        "-    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)",
        "+    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)",
    ]
    assert "package.script" not in sys.modules
