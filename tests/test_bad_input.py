"""Wrong inputs: each is one message that says what is wrong, and none is taken for something else."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import tilefit
from tilefit.capture.child import capture_target
from tilefit.capture.inputs import parse_inputs
from tilefit.cli import config, main, output
from tilefit.cost.calibration import read
from tilefit.errors import TilefitError, UsageError
from tilefit.options import TargetOptions
from tilefit.profiling.trace import read_trace
from tilefit.report import loads

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "tests" / "report" / "data" / "first-report.json"

# ruff: noqa: E501 - a line of a table for each option

# ---- the command line --------------------------------------------------------------------------

_NET = ("hf:gpt2", "--gpu", "h200")
#: Texts that are no size.
_NO_SIZE = (
    "0",
    "-1",
    "1.5",
    "1e3",
    "nan",
    "inf",
    "",
    " ",
    "x",
    "0x10",
    "1_0_",
    "９９x",
    "--",
    "1,000",
    "١٢x",
)
#: Options of a count, by a command that has them.
_COUNTS = (
    *(("check", *_NET, option) for option in ("--batch", "--seq", "--image-size", "--tensor-parallel")),
    *(("check", *_NET, option) for option in ("--pipeline-parallel", "--data-parallel")),
    *(("check", "train.py", "--gpu", "h200", option) for option in ("--steps",)),
    ("fix", *_NET, "--batch"),
    ("explain", *_NET, "--batch"),
    ("gemm", "64", "64", "64", "--gpu", "h200", "--batch"),
)
#: Options and values that none of them takes.
_WRONG = (
    *(("check", *_NET, "--amp", value) for value in ("bf6", "", "BF16 ", "fp8", "int8", "16", "none", "auto")),
    *(("check", *_NET, "--optimizer", value) for value in ("adm", "", "lion", "SGD ", "0")),
    *(("check", *_NET, "--min-gain", value) for value in ("-0.1", "1.1", "nan", "inf", "5%", "", "x")),
    *(("check", *_NET, "--timeout", value) for value in ("0", "-3", "nan", "x", "")),
    *(("check", *_NET, "--select", value) for value in ("", ",", "ALM", "ALN9999", "*", "aln-002", "ALN 002")),
    *(("check", *_NET, "--ignore", value) for value in ("", ",", "ALM", "ALN9999", "*", "?")),
    *(("check", *_NET, "--output-format", value) for value in ("", "pdf", "HTML ", "docx", "txt", "md")),
    *(("check", *_NET, "--output-file", value) for value in ("x.docx", "no/folder/x.html", ".", "/", "x.pdf")),
    *(("check", *_NET, "--price", value) for value in ("-1", "nan", "inf", "x", "", "h200=", "h200=x", "=")),
    *(("check", *_NET, "--price", "2", "--output-format", name) for name in ("json", "sarif", "markdown")),
    *(("check", *_NET, "--libraries", value) for value in ("cublas", "cublas=", "cublas=x", "cudart=3", "=10")),
    *(("check", *_NET, "--calibration", value) for value in ("none.npz", ".", "/dev/null", "")),
    *(("check", *_NET, *flags) for flags in (("--infer", "--optimizer", "sgd"), ("--infer", "--fused-optimizer"))),
    *(("check", "hf:gpt2", "--gpu", name) for name in ("", " ", "h2000", "cuda", "0", "a100;h100", "*", "🦆")),
    *(("check", name, "--gpu", "h200") for name in (
        "", " ", ":", "x", "x:", ":x", "hf:", "timm:", "torchvision:", "nothing.py", "nothing.py:f", ".py",
        "dir.py", "dir.py:f", "/", "/nothing/x.py:f", "hf", "../x.py:f", "a b.py:f", "\udcff.py:f", "-",
    )),
    *(("gemm", "64", "64", "64", "--gpu", "h200", "--dtype", value) for value in ("", "bf61", "torch", "16", "B F 16")),
    *(("gemm", "64", "64", "64", "--gpu", "h200", "--layout", value) for value in ("", "XX", "tn ", "T", "TNN")),
    *(("gemm", *sizes, "--gpu", "h200") for sizes in (("64",), ("64", "64"), ("64",) * 4, ())),
    *(("gpu", name) for name in ("h2000", "", " ", "🦆", "h200 l4", "-1", "*")),
    *(("rule", code) for code in ("", " ", "ALN", "ALN0002", "XXX001", "aln", "*", "002")),
    *(("report", name) for name in ("none.json", ".", "/", "", "bad.json", "empty.json", "list.json", "bytes.json")),
    *(("report", str(REPORT), "--output-format", value) for value in ("", "pdf", "csv", "svg")),
    *(("explain", name) for name in ("none.json", "bad.json", "nothing", "nothing.py:f", "", "hf:")),
    *(("explain", str(REPORT), what) for what in ("#99999", "#x", "#-1", "#", "nothing", "conv", "*.*.*.*.*.*.*", "ALN999")),
    *(("compare", *names) for names in (
        ("none.json", "none.json"), ("bad.json", "bad.json"), ("a", "b"), (".", "."), ("bad.json", "x.sqlite"), ("x",),
    )),
    *(("sweep", *_NET, "--over", value) for value in (
        "", "batch", "batch=", "batch=x", "batch=0", "batch=8..1", "batch=1..", "batch=..", "btch=1", "=1", "gpu=",
        "gpu=nope", "compile=maybe", "amp=x", "batch=1,,2x", "batch=-1..4", "batch=nan",
    )),
    *(("curve", *_NET, "--batch", value) for value in ("", "x", "8:1", "1:", ":", "0:4", "-1:4", "1:nan", "1:2:3:4")),
    *(("curve", "gemm", *sizes, "--gpu", "h200") for sizes in (("1:8",), ("x", "8", "8"), ("0", "8", "8"), ("8:1", "8", "8"))),
    *(("plan", "hf:gpt2", "--gpus", value) for value in ("0", "-8", "x", "1.5", "nan", "")),
    *(("plan", "hf:gpt2", "--nodes", value) for value in ("-1", "x", "3", "nan")),
    *(("plan", "hf:gpt2", "--network", value) for value in ("", "carrier-pigeon", "8x", "x400", "0x400", "8x-1")),
    *(("plan", "hf:gpt2", "--price", value) for value in ("x", "-2", "nan", "l4=2", "")),
    *(("plan", "hf:gpt2", "--set", value) for value in ("", "x", "x=", "x=0", "=3", "x=1.5", "x=-1", "1x=3")),
    *(("plan", "hf:gpt2", "--launch", value) for value in ("", "nope", "Torchrun ", "1")),
    ("explain", *_NET[:1], "", *_NET[1:]),
    *(("report", name) for name in ("deep.json", "nan.json")), ("compare", "deep.json", "deep.json"),
    *(("fix", *_NET, "--level", value) for value in ("", "safest", "SAFE ", "1")),
    *(("fix", *_NET, "--memory-budget", value) for value in ("-1", "x", "nan", "")),
    *(("fix", *_NET, "--select", value) for value in ("", ",")), ("fix", "train.py", "--gpu", "h200", "--memory-budget", "40"),
    *(("fix", *_NET, *flags) for flags in (("--diff",), ("--write",), ("--diff", "--write"))),
    *(("profile", name) for name in ("", "none.json", "bad.json", "empty.json", "list.json", "nothing.py", ".")),
    *(("precision", name) for name in ("", "nothing.py", ".", "/")),
    *(("calibrate", *flags) for flags in (("--minutes", "0"), ("--minutes", "x"), ("--merge", "a"), ("--compare", "a", "b"))),
    *(("bench", name) for name in ("", "nothing.py:f", ":", "nope")),
    ("chek",), ("check",), ("--nope",), ("check", "--gpu"), ("rules", "x"), ("tour", "x"), ("tour", "--gpu", "nope"),
    ("check", *_NET, "--gpu", "nope"), ("gemm", "8", "8", "8", "--gpu", "h200", "--gpu", "l4"),
    ("check", *_NET, "--fake-data"), ("check", *_NET, "another"), ("check", *_NET, "hf:gpt2", "--output-file", "x.html"),
    ("doctor", "x"), ("doctor", "--nope"),
)  # fmt: skip
LINES = (
    *_WRONG,
    *((*before, value) for before in _COUNTS for value in _NO_SIZE if value != "--"),
    *(("gemm", *("64",) * at, value, *("64",) * (2 - at), "--gpu", "h200") for at in range(3) for value in _NO_SIZE if value != "--"),
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that commands run in: with files that are not what their names say."""
    here = tmp_path_factory.mktemp("bad")
    (here / "dir.py").mkdir()
    (here / "train.py").write_text("")
    (here / "bad.json").write_text('{"schema_version": 1')
    (here / "list.json").write_text("[1, 2]")
    (here / "empty.json").write_text("")
    (here / "deep.json").write_text("[" * 100_000)
    (here / "nan.json").write_text('{"schema_version": NaN}')
    (here / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (here / "x.sqlite").write_bytes(b"SQLite format 3\0")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("XDG_DATA_HOME", str(here / "data"))
        patch.setenv("COLUMNS", "80")
        yield here


def said(arguments: tuple[str, ...]) -> tuple[int, str, str]:
    out, error = io.StringIO(), io.StringIO()
    for stream in (out, error):
        stream.reconfigure = lambda **_: None  # type: ignore[attr-defined]
    with redirect_stdout(out), redirect_stderr(error), pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0), out.getvalue(), error.getvalue()


@pytest.mark.parametrize("arguments", LINES, ids=" ".join)
@pytest.mark.timeout(20)
def test_a_wrong_command_line_is_one_message(
    folder: Path, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_PATIENCE_S", 60.0)  # a slow machine is told what goes on until then
    code, out, error = said(arguments)
    assert code == 2, out or error
    assert out == ""
    assert error.startswith(("error: ", "note: ")), error
    assert "bug in tilefit" not in error
    assert "Traceback" not in error


# ---- Python ------------------------------------------------------------------------------------

_LINEAR = nn.Linear(8, 8)
_ROWS = torch.empty(4, 8)


def _refused(call: Callable[[], Any]) -> str:
    """What a call is refused with; whatever else it raises is a bug."""
    with pytest.raises(TilefitError) as refused:
        call()
    return str(refused.value)


_CALLS: dict[str, Callable[[], Any]] = {
    "no GPU of this name": lambda: tilefit.check(_LINEAR, _ROWS, gpu="h2000"),
    "an empty name": lambda: tilefit.check(_LINEAR, _ROWS, gpu=""),
    "no GPUs": lambda: tilefit.check(_LINEAR, _ROWS, gpu=[]),
    "one of several unknown": lambda: tilefit.check(_LINEAR, _ROWS, gpu=["h200", "nope"]),
    "no model": lambda: tilefit.check(None, _ROWS, gpu="h200"),
    "a number as a model": lambda: tilefit.check(3, _ROWS, gpu="h200"),
    "inputs of another size": lambda: tilefit.check(_LINEAR, torch.empty(4, 9), gpu="h200"),
    "too many inputs": lambda: tilefit.check(_LINEAR, (_ROWS, _ROWS), gpu="h200"),
    "inputs by a wrong name": lambda: tilefit.check(_LINEAR, {"x": _ROWS}, gpu="h200"),
    "no inputs": lambda: tilefit.check(_LINEAR, gpu="h200"),
    "an optimizer that is one": lambda: tilefit.check(
        _LINEAR, _ROWS, gpu="h200", optimizer=torch.optim.AdamW(_LINEAR.parameters())
    ),
    "an unknown optimizer": lambda: tilefit.check(_LINEAR, _ROWS, gpu="h200", optimizer="lion"),
    "amp of another type": lambda: tilefit.check(_LINEAR, _ROWS, gpu="h200", amp="fp8"),
    "amp that is true": lambda: tilefit.check(_LINEAR, _ROWS, gpu="h200", amp=True),
    "amp in integers": lambda: tilefit.check(_LINEAR, _ROWS, gpu="h200", amp=torch.int8),
    "an unknown rule": lambda: tilefit.check(_LINEAR, _ROWS, gpu="h200", select=["ALM"]),
    "rules by an empty name": lambda: tilefit.check(_LINEAR, _ROWS, gpu="h200", select=[""]),
    "an unknown rule to ignore": lambda: tilefit.check(_LINEAR, _ROWS, gpu="h200", ignore=["nope"]),
    "a gain without end": lambda: tilefit.check(_LINEAR, _ROWS, gpu="h200", min_gain=float("-inf")),
    "a gain above all": lambda: tilefit.check(_LINEAR, _ROWS, gpu="h200", min_gain=2.0),
    "a gain that is no number": lambda: tilefit.check(_LINEAR, _ROWS, gpu="h200", min_gain=float("nan")),
    "a gain in words": lambda: tilefit.check(_LINEAR, _ROWS, gpu="h200", min_gain="5%"),
    "a missing calibration": lambda: tilefit.check(_LINEAR, _ROWS, gpu="h200", calibration="none.npz"),
    "a target that is none": lambda: tilefit.check("nothing", gpu="h200"),
    "a target with inputs": lambda: tilefit.check("hf:gpt2", _ROWS, gpu="h200"),
    "a target with a name": lambda: tilefit.check("hf:gpt2", name="x", gpu="h200"),
    "a batch of nothing": lambda: tilefit.check("hf:gpt2", gpu="h200", batch=0),
    "a batch below nothing": lambda: tilefit.check("hf:gpt2", gpu="h200", batch=-3),
    "half a sample": lambda: tilefit.check("hf:gpt2", gpu="h200", batch=1.5),
    "a batch in words": lambda: tilefit.check("hf:gpt2", gpu="h200", batch="4"),
    "a product of nothing": lambda: tilefit.estimate(tilefit.ops.Gemm(0, 1, 1), gpu="h200"),
    "a product of a wrong type": lambda: tilefit.ops.Gemm(1, 1, 1, dtype="bf61"),
    "a product of a wrong layout": lambda: tilefit.ops.Gemm(1, 1, 1, layout="XX"),
    "a fix of no name": lambda: tilefit.optimize(_LINEAR, _ROWS, gpu="h200", select=["nope"]),
    "a level of no name": lambda: tilefit.optimize(_LINEAR, _ROWS, gpu="h200", level="safest"),
    "a file's ending of no format": lambda: tilefit.check(_LINEAR, _ROWS, gpu="h200").save("x.docx"),
    "a loss that is none": lambda: tilefit.check(_LINEAR, _ROWS, gpu="h200", loss=lambda out: "x"),
    "a model that fails": lambda: tilefit.check(lambda x: 1 / 0, _ROWS, gpu="h200"),
}


def test_unknown_keywords_are_those_of_any_function() -> None:
    for keyword in ("batchsize", "batch"):  # the second is one of a target that is named
        with pytest.raises(TypeError, match=keyword):
            tilefit.check(_LINEAR, _ROWS, gpu="h200", **{keyword: 3})


def test_there_are_enough() -> None:
    assert len({*LINES}) + len(_CALLS) + len(_INPUTS) + len(_SCRIPTS) + len(_TOML) >= 500


@pytest.mark.parametrize("call", _CALLS.values(), ids=_CALLS)
def test_a_wrong_call_says_what_is_wrong(folder: Path, call: Callable[[], Any]) -> None:
    assert len(_refused(call)) > 10


_INPUTS = (
    "", " ", "x", "int64", "int64[", "int64[]x", "int64[a]", "int64[-1]", "int64[0]", "x: y: int64[1]", "int65[1]",
    "[1,2]", "x:", ": int64[2]", "int64[1,]x", "int64[1;2]", "int64 1,2", "float[1.5]", "x: int64[2",
)  # fmt: skip


@pytest.mark.parametrize("spec", _INPUTS)
def test_a_wrong_input_is_refused(spec: str) -> None:
    assert repr(spec.strip())[1:-1] in _refused(lambda: parse_inputs([spec]))


# ---- programs and factories --------------------------------------------------------------------

_SCRIPTS = {
    "no Python": "def build(:\n",
    "bytes": "\x00",
    "an exception at import": "1 / 0\n",
    "a missing package": "import nothing_of_this_name\n",
    "an exit at import": "import sys; sys.exit(3)\n",
    "no factory": "x = 1\n",
    "a factory that is a number": "build = 3\n",
    "nothing returned": "def build(): pass\n",
    "a number returned": "def build(): return 3\n",
    "four returned": "def build(): return 1, 2, 3, 4\n",
    "arguments wanted": "def build(x): return x\n",
    "an exception": "def build(): raise ValueError('no')\n",
    "an exit": "def build(): exit()\n",
    "an endless recursion": "def build(): return build()\n",
    "inputs that do not fit": "import torch\ndef build(): return torch.nn.Linear(2, 2), torch.ones(1, 3)\n",
    "no tensor at all": "import torch\ndef build(): return torch.nn.Linear(2, 2), 'x'\n",
    "a model that raises": (
        "import torch\nclass M(torch.nn.Module):\n    def forward(self, x): raise KeyError('k')\n"
        "def build(): return M(), torch.ones(1)\n"
    ),
    "values of tensors": (
        "import torch\nclass M(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.w = torch.nn.Linear(2, 2)\n"
        "    def forward(self, x): return self.w(x) if x.sum() > 0 else x\ndef build(): return M(), torch.ones(1, 2)\n"
    ),
    "a step that computes nothing": "import torch\ndef step(x): return x\ndef build(): return step, torch.ones(1)\n",
}  # fmt: skip


@pytest.mark.parametrize("text", _SCRIPTS.values(), ids=_SCRIPTS)
def test_a_wrong_factory_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "code_of_mine.py").write_text(text)
    words = _refused(lambda: capture_target("code_of_mine.py:build", TargetOptions()))
    sys.modules.pop("code_of_mine", None)
    assert any(known in words for known in ("code_of_mine", "build", "step", "the inputs")), words


# ---- files -------------------------------------------------------------------------------------

_TOML = (
    "x = ", "[tool.tilefit]\nnope = 1", "[tool.tilefit]\ngpu = 1", "[tool.tilefit]\ngpu = [1]",
    "[tool.tilefit]\ngpu = {a = 1}", "[tool.tilefit]\nselect = 3", "[tool.tilefit]\nselect = [[]]",
    "[tool.tilefit]\nmin-gain = 2", "[tool.tilefit]\nmin-gain = -0.5", "[tool.tilefit]\nmin-gain = '5%'",
    "[tool.tilefit]\nmin-gain = true", "[tool.tilefit]\nmin-gain = nan", "[tool.tilefit]\nmin-gain = inf",
    "[tool.tilefit]\nper-module-ignores = ['ALN']", "[tool.tilefit]\nper-module-ignores = {h = 1}",
    "[tool]\ntilefit = 3", "[tool]\ntilefit = []", "tool = 3", "[tool.tilefit]\nignore = true",
    "[tool.tilefit]\nmin_gain = 0.1", "[tool.tilefit.gpu]\nname = 'h200'", "\x00", "[tool.tilefit",
)  # fmt: skip


@pytest.mark.parametrize("text", _TOML)
def test_a_wrong_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert "pyproject.toml" in _refused(lambda: config.load(tmp_path))


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        yield from _leaves(child, (*path, key))


_DATA = json.loads(REPORT.read_text(encoding="utf-8"))
_PATHS = [path for path in _leaves(_DATA) if path]
_VALUES = st.sampled_from(
    [None, True, -1, -1e9, float("nan"), float("inf"), 1e400, "", "x", [], {}, [[]], {"a": {}}, 0.5]
)


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(_PATHS), value=_VALUES, kept=st.booleans())
def test_a_report_that_was_changed_is_refused_or_shows_it(
    path: tuple[Any, ...], value: Any, kept: bool
) -> None:
    """A value is either none that a report can have, or it is what the report then says."""
    data = json.loads(REPORT.read_text(encoding="utf-8"))
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    if kept:
        parent[path[-1]] = value
    else:
        del parent[path[-1]]
    text = json.dumps(data)
    try:
        loaded = loads(text, note=lambda _: None)
    except UsageError:
        return
    again = loaded.to_dict()
    for key in path[:-1] if kept else ():
        again = again[key]
    if kept:
        said_now = json.loads(json.dumps(again))[path[-1]]
        assert said_now == value
    loaded._repr_html_()
    str(loaded)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    text=st.one_of(
        st.text(max_size=60),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
            ),
        ).map(json.dumps),
    )
)
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        loads(text)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    content=st.one_of(
        st.binary(max_size=80),
        st.sampled_from(
            [b"{}", b"[]", b'{"traceEvents": 3}', b'{"traceEvents": [1, null]}', b"\x1f\x8b\x08"]
        ),
        st.lists(
            st.dictionaries(
                st.sampled_from(["ph", "ts", "dur", "name", "cat", "args", "pid", "tid"]),
                st.sampled_from(
                    ["X", "kernel", -1, None, {}, "nan", 1e30, [], "ProfilerStep#1", {"External id": "x"}]
                ),
            ),
            max_size=4,
        ).map(lambda events: json.dumps({"traceEvents": events}).encode()),
    ),
    ending=st.sampled_from([".json", ".json.gz"]),
)
def test_what_is_no_trace_is_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, ending: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"trace{ending}"
    path.write_bytes(content)
    with pytest.raises(TilefitError):
        read_trace(path)


@pytest.fixture(scope="module")
def calibration() -> bytes:
    """A shipped one, as bytes."""
    (path, *_) = sorted((ROOT / "src" / "tilefit" / "cost" / "data").rglob("*.npz"))
    return path.read_bytes()


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_calibration_is_refused(
    tmp_path_factory: pytest.TempPathFactory, calibration: bytes, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(calibration) - 1))
    content = data.draw(st.sampled_from([calibration[:cut], b"", b"PK\x03\x04", calibration[cut:] + b"x"]))
    if content == calibration + b"x":
        return
    path = tmp_path_factory.getbasetemp() / "gpu.npz"
    path.write_bytes(content)
    with pytest.raises(TilefitError):
        read(path)


def test_a_calibration_with_objects_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gpu.npz"
    for arrays in ({}, {"a": np.zeros(3)}, {"a": np.array([object()])}, {"facts": np.array("{}")}):
        np.savez(path, **arrays, allow_pickle=True)
        with pytest.raises(TilefitError):
            read(path)
