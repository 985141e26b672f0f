from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from inline_snapshot import snapshot

from tilefit.cost import Estimate
from tilefit.gpus import Gpu
from tilefit.ops import Gemm


@pytest.fixture
def toy_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that no fit changes: 1 us per tile of 64x64, five times that where 8 does not divide n."""

    def estimate_all(ops: Iterable[Gemm], gpu: Gpu) -> list[Estimate]:
        found = []
        for op in ops:
            tiles = -(-op.m // 64) * -(-op.n // 64)
            time_s, family = (5e-6 * tiles, "sm80") if op.n % 8 else (1e-6 * tiles, "sm90")
            found.append(Estimate(time_s, time_s / 2, time_s * 2, "math", kernel_family=family))
        return found

    monkeypatch.setattr("tilefit.cost.curve.estimate_all", estimate_all)


def _shown(out: str) -> str:
    """Without the blanks that fill a table's last column."""
    return "\n".join(line.rstrip() for line in out.splitlines())


@pytest.mark.usefixtures("toy_model")
def test_rows_of_a_product(tilefit) -> None:
    ran = tilefit("curve", "gemm", "1:256", "4096", "4096", "--gpu", "h200")
    assert ran.code == 0
    assert _shown(ran.out) == snapshot("""\
gemm m=1:256 n=4096 k=4096 batch=1 bf16 on NVIDIA H200 SXM 141GB

TN, TFLOP/s over m
  40 │
     │                 ⢠⠄                ⣀⠤                ⣀⡠⠄              ⢀⣀⣠⠤
     │               ⣠⠔⠁            ⢀⣠⠤⠒⠉⠁          ⣀⣠⠤⠔⠒⠋⠉        ⢀⣀⣀⠤⠤⠒⠒⠋⠉⠉
     │             ⡠⠚⠁          ⣀⡠⠔⠊⠁        ⢀⣀⡤⠴⠒⠊⠉⠁        ⠠⠤⠖⠒⠋⠉⠉
     │           ⡰⠋         ⣀⠤⠒⠉⠁          ⠒⠉⠁
     │        ⢀⠴⠋       ⠠⠔⠚⠉
     │      ⣠⠔⠁
     │    ⣠⠜⠁
     │  ⡠⠊⠁
   0 │⡴⠋
     └──────────────────────────────────────────────────────────────────────────
knee                   ▲
                    50            100            150           200

m       time   80 % interval          rate
1    64.0 µs  32.0 to 128 µs   524 GFLOP/s
32   64.0 µs  32.0 to 128 µs  16.8 TFLOP/s
64   64.0 µs  32.0 to 128 µs  33.6 TFLOP/s
96    128 µs  64.0 to 256 µs  25.2 TFLOP/s
128   128 µs  64.0 to 256 µs  33.6 TFLOP/s
160   192 µs  96.0 to 384 µs  28.0 TFLOP/s
192   192 µs  96.0 to 384 µs  33.6 TFLOP/s
224   256 µs   128 to 512 µs  29.4 TFLOP/s
256   256 µs   128 to 512 µs  33.6 TFLOP/s

    knee m     time          rate  best m     time          rate  dips
TN      61  64.0 µs  32.0 TFLOP/s      64  64.0 µs  33.6 TFLOP/s     0

TN: the rate falls by at least 5 % right after 64, 128, 192
TN: no dips (a size up to 25 % larger takes at least 5 % less time)

Times: from the GPU's datasheet.\
""")


@pytest.mark.usefixtures("toy_model")
def test_layouts_side_by_side(tilefit) -> None:
    ran = tilefit(
        *("curve", "gemm", "512", "500:520", "512", "--layout", "TN", "--layout", "NT", "--gpu", "h200")
    )
    assert _shown(ran.out) == snapshot("""\
gemm m=512 n=500:520 k=512 batch=1 bf16 on NVIDIA H200 SXM 141GB

TN, TFLOP/s over n
   5 │                                            ⡀
     │              ⠈                                                          ⠐
     │
     │
     │                                 ⡀   ⡀  ⢀
   0 │⠁  ⠈   ⠁   ⠁      ⠈   ⠁  ⠈   ⠈                  ⠁  ⠈   ⠈   ⠁  ⠈   ⠈   ⠁
     └──────────────────────────────────────────────────────────────────────────
dips  ▾  ▾   ▾   ▾      ▾   ▾  ▾   ▾   ▾   ▾  ▾       ▾  ▾   ▾   ▾  ▾   ▾   ▾
      500               505                510               515

NT, TFLOP/s over n
   5 │                                            ⡀
     │              ⠈                                                          ⠐
     │
     │
     │                                 ⡀   ⡀  ⢀
   0 │⠁  ⠈   ⠁   ⠁      ⠈   ⠁  ⠈   ⠈                  ⠁  ⠈   ⠈   ⠁  ⠈   ⠈   ⠁
     └──────────────────────────────────────────────────────────────────────────
dips  ▾  ▾   ▾   ▾      ▾   ▾  ▾   ▾   ▾   ▾  ▾       ▾  ▾   ▾   ▾  ▾   ▾   ▾
      500               505                510               515

n                       TN                     NT
500    320 µs, 819 GFLOP/s    320 µs, 819 GFLOP/s
504  64.0 µs, 4.13 TFLOP/s  64.0 µs, 4.13 TFLOP/s
508    320 µs, 832 GFLOP/s    320 µs, 832 GFLOP/s
512  64.0 µs, 4.19 TFLOP/s  64.0 µs, 4.19 TFLOP/s
516    360 µs, 751 GFLOP/s    360 µs, 751 GFLOP/s
520  72.0 µs, 3.79 TFLOP/s  72.0 µs, 3.79 TFLOP/s

    knee n  time  rate  best n     time          rate  dips
TN       –                 512  64.0 µs  4.19 TFLOP/s    18
NT       –                 512  64.0 µs  4.19 TFLOP/s    18

NT / TN, time: 1.00 (geometric mean), 1.00 at 500 to 1.00 at 500; the intervals
do not overlap at 0 of 21.
80 % interval of a predicted time, in the median: TN −50 to +100 %, NT −50 to
+100 %.

TN: dips (a size up to 25 % larger takes at least 5 % less time)
n        sizes  slowest  next n     time  speedup  kernels
500–503      4   320 µs     504  64.0 µs    5.00x  sm80 -> sm90
505–511      7   320 µs     512  64.0 µs    5.00x  sm80 -> sm90
513–519      7   360 µs     520  72.0 µs    5.00x  sm80 -> sm90

NT: dips (a size up to 25 % larger takes at least 5 % less time)
n        sizes  slowest  next n     time  speedup  kernels
500–503      4   320 µs     504  64.0 µs    5.00x  sm80 -> sm90
505–511      7   320 µs     512  64.0 µs    5.00x  sm80 -> sm90
513–519      7   360 µs     520  72.0 µs    5.00x  sm80 -> sm90

Times: from the GPU's datasheet.\
""")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_it_fits_the_terminal_without_colour(tilefit, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    out = tilefit("curve", "gemm", "1:512", "4096", "4096", "--gpu", "h200").out
    assert max(map(len, out.splitlines())) <= columns
    assert "\x1b" not in out


def test_a_vocabulary_s_next_efficient_size(tilefit) -> None:
    ran = tilefit(
        *("curve", "linear", "--rows", "16384", "--in", "768", "--out", "50250:50260", "--gpu", "h200"),
        *("--output-format", "json"),
    )
    found = json.loads(ran.out)
    assert (found["gpu"], found["over"]) == ("h200", "out")
    (layer,) = found["curves"]
    assert [point["size"] for point in layer["points"]] == list(range(50250, 50261))
    better = {size: dip for dip in layer["dips"] for size in dip["sizes"]}
    assert better[50257]["next"] == 50304
    assert better[50257]["speedup"] > 3
    assert 50256 not in better


def test_names_of_the_same_size_mean_the_same(tilefit) -> None:
    shape = ("--gpu", "h200", "--output-format", "json")
    rows = tilefit("curve", "linear", "--hidden", "64", "--vocab", "128", "--rows", "8:16", *shape)
    seq = tilefit("curve", "linear", "--in", "64", "--out", "128", "--batch", "1", "--seq", "8:16", *shape)
    assert json.loads(rows.out)["curves"] == json.loads(seq.out)["curves"]


def test_inference_is_the_forward_product_alone(tilefit) -> None:
    shape = ("--rows", "64", "--in", "64", "--out", "64:72", "--gpu", "h200", "--output-format", "json")
    train, infer = (json.loads(tilefit("curve", "linear", *shape, *more).out) for more in ((), ("--infer",)))
    (trained,), (inferred,) = train["curves"], infer["curves"]
    assert [p["flop"] for p in trained["points"]] == [3 * p["flop"] for p in inferred["points"]]


def test_over_varies_a_plain_number_from_one(tilefit) -> None:
    ran = tilefit(
        *("curve", "gemm", "16", "64", "64", "--over", "m", "--gpu", "h200", "--output-format", "json")
    )
    (only,) = json.loads(ran.out)["curves"]
    assert [point["size"] for point in only["points"]] == list(range(1, 17))


def test_a_file_gets_the_format_of_its_ending(tilefit, tmp_path: Path) -> None:
    command = ("curve", "gemm", "1:64", "512", "512", "--gpu", "h200", "--output")
    assert tilefit(*command, "curve.csv").out == ""
    rows = list(csv.DictReader((tmp_path / "curve.csv").read_text().splitlines()))
    assert [row["size"] for row in rows] == [str(size) for size in range(1, 65)]
    assert {"curve", "provenance", "time_s", "low_s", "high_s", "flop_per_s", "next"} <= rows[0].keys()
    tilefit(*command, "curve.json")
    assert json.loads((tmp_path / "curve.json").read_text())["over"] == "m"
    tilefit(*command, "curve.txt")
    assert "TFLOP/s over m" in (tmp_path / "curve.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("512:1", "64", "64"), "the range 512:1 is reversed"),
        (("1:8", "1:8", "64"), "several sizes are ranges: m, n"),
        (("8", "8", "8"), "no size varies"),
        (("1:8", "8", "8", "--over", "n"), "m is a range, but --over says n"),
        (("1:8", "8", "x"), "k: 'x' is neither a size nor a range"),
        (("0:8", "8", "8"), "m: '0:8' is neither a size nor a range"),
        (("1:8:2:3", "8", "8"), "m: '1:8:2:3' is neither a size nor a range"),
        (("1:9999999:1", "8", "8"), "more than 20,000 sizes"),
        (("1:8", "8", "8", "--layout", "XX"), "unknown layout 'XX'"),
        (("1:8", "8", "8", "--dtype", "int5"), "unknown element type 'int5'"),
        (("1:8", "8", "8", "--gpu", "h2000"), "unknown GPU 'h2000'"),
        (("1:8", "8", "8", "--output", "nowhere/curve.csv"), "cannot be written"),
        (("1:8", "8", "8", "--output", "curve.svg"), "Write --plot curve.svg"),
        (("1:8", "8", "8", "--plot", "curve.pdf"), "curve.pdf: a picture is an SVG or a PNG"),
        (("1:8", "8", "8", "--plot", "nowhere/curve.svg"), "cannot be written"),
        (("1:8", "8"), "tilefit curve gemm --help"),
    ],
)
def test_bad_input_is_named_with_exit_2(tilefit, arguments: tuple[str, ...], message: str) -> None:
    ran = tilefit("curve", "gemm", *(("--gpu", "h200") if "--gpu" not in arguments else ()), *arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert message in ran.err
    assert "Traceback" not in ran.err


# --- pictures, comparisons -------------------------------------------------------------------------


def test_a_plot_is_drawn_beside_the_text(tilefit, tmp_path: Path) -> None:
    ran = tilefit(
        *("curve", "gemm", "1:64", "512", "512", "--layout", "TN", "--layout", "NT", "--gpu", "h200"),
        *("--plot", "curve.svg"),
    )
    assert "TFLOP/s over m" in ran.out
    root = ElementTree.parse(tmp_path / "curve.svg").getroot()
    texts = {each.text for each in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"TN", "NT", "m", "TFLOP/s, estimated"} <= texts
    pytest.importorskip("PIL")
    tilefit("curve", "gemm", "1:64", "512", "512", "--gpu", "h200", "--plot", "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_layouts_are_compared_by_their_times(tilefit) -> None:
    out = tilefit(
        *("curve", "gemm", "64:512:64", "4096", "4095", "--layout", "NN", "--layout", "TN", "--gpu", "h200")
    ).out
    line = " ".join(out[out.index("TN / NN, time:") :].split())
    mean = float(line.split()[4])
    ratios = json.loads(
        tilefit(
            *("curve", "gemm", "64:512:64", "4096", "4095", "--layout", "NN", "--layout", "TN"),
            *("--gpu", "h200", "--output-format", "json"),
        ).out
    )["curves"]
    pairs = zip(*([point["time_s"] for point in each["points"]] for each in ratios), strict=True)
    found = [tn / nn for nn, tn in pairs]
    assert min(found) <= mean <= max(found)
    assert f"of {len(found)}." in line
    assert "80 % interval of a predicted time" in line


# --- a model's step --------------------------------------------------------------------------------

MODEL = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))

    def forward(self, x):
        return self.layers(x)

def build(hidden=256):
    import torch
    return Net(hidden), torch.empty(32, 64)

def words(vocab_size=100):
    return nn.Sequential(nn.Embedding(vocab_size, 16), nn.Linear(16, vocab_size))
"""


@pytest.fixture
def model(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL, encoding="utf-8")


@pytest.mark.usefixtures("model")
def test_a_model_s_step_over_its_batch(tilefit) -> None:
    ran = tilefit("curve", "net.py:build", "--batch", "1:64", "--gpu", "h200", "--amp", "bf16")
    assert ran.code == 0
    words = " ".join(ran.out.split())
    assert words.startswith("net.py:build, training step, bf16 autocast, batch=1:64 on NVIDIA H200")
    assert "captured with 32 samples and scaled" in words
    (header,) = (line for line in ran.out.splitlines() if line.startswith("batch "))
    assert header.split() == ["batch", "time", "80", "%", "interval", "rate", "samples/s", "memory"]


@pytest.mark.usefixtures("model")
def test_a_model_s_step_over_a_size_of_its_own(tilefit) -> None:
    found = json.loads(
        tilefit(
            *("curve", "net.py:build", "--hidden", "248:264:4", "--gpu", "h200", "--amp", "bf16"),
            *("--infer", "--output-format", "json"),
        ).out
    )
    (curve,) = found["curves"]
    assert (found["over"], [point["size"] for point in curve["points"]]) == (
        "hidden",
        [248, 252, 256, 260, 264],
    )
    assert [point["flop"] for point in curve["points"]] == [2 * 2 * 32 * 64 * n for n in range(248, 265, 4)]
    assert all(point["memory_bytes"] > 0 and point["samples_per_s"] > 0 for point in curve["points"])


@pytest.mark.usefixtures("model")
def test_sequence_and_vocabulary_reach_the_model(tilefit) -> None:
    common = ("curve", "net.py:words", "--gpu", "h200", "--infer", "--batch", "2", "--output-format", "json")
    by_seq = json.loads(tilefit(*common, "--seq", "4:32:4", "--vocab", "64").out)
    (curve,) = by_seq["curves"]
    assert by_seq["fixed"] == {"batch": 2, "vocab": 64}
    assert [point["flop"] for point in curve["points"]] == [2 * 2 * n * 16 * 64 for n in range(4, 33, 4)]
    assert "tokens_per_s" in curve["points"][0]
    by_vocab = json.loads(tilefit(*common, "--seq", "8", "--set", "vocab_size=60:64").out)
    assert [point["flop"] for point in by_vocab["curves"][0]["points"]] == [
        2 * 16 * 16 * n for n in range(60, 65)
    ]


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("net.py:build",), "no size varies"),
        (("net.py:build", "--over", "vocab"), "Write --vocab FIRST:LAST"),
        (("net.py:build", "--over", "depth"), "Write --set depth=FIRST:LAST"),
        (("net.py:build", "--batch", "1:8", "--seq", "1:8"), "several sizes are ranges: batch, seq"),
        (("net.py:build", "--batch", "1:8", "--set", "width"), "cannot read --set width"),
        (("net.py:build", "--hidden", "1:8", "--set", "hidden=3"), "the size hidden is given twice"),
        (("net.py:build", "--vocab", "10:20:5"), "net.py:build has no size 'vocab' to set"),
        (("net.py:build", "--seq", "8:64"), "net.py:build does not depend on seq"),
        (("net.py:no", "--batch", "1:8"), "has no 'no'"),
        (("nonsense", "--batch", "1:8"), "cannot read the target 'nonsense'"),
        (("net.py:build", "--batch", "1:8", "--gpu", "x9000"), "unknown GPU 'x9000'"),
    ],
)
def test_what_a_model_cannot_do_is_said_with_exit_2(
    tilefit, arguments: tuple[str, ...], message: str
) -> None:
    ran = tilefit("curve", *arguments, *(() if "--gpu" in arguments else ("--gpu", "h200")))
    assert ran.code == 2
    assert ran.out == ""
    assert message in ran.err
    assert "Traceback" not in ran.err


# --- measured --------------------------------------------------------------------------------------


class Clock:
    """A host clock that goes on by 2 ms at each look: a call takes 2 ms."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 2e-3
        return self.now_s


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The CPU passes for an H200."""
    import torch

    from tilefit.cli import local_gpu
    from tilefit.measure import timer
    from tilefit.measure.environment import Environment

    here = local_gpu.LocalGpu(
        timer.HostDevice(Clock()), torch.device("cpu"), Environment("NVIDIA H200", "1", "2", "13", "9")
    )
    monkeypatch.setattr(local_gpu, "local_gpu", lambda: here)
    monkeypatch.setenv("TILEFIT_STORE", str(tmp_path / "store.db"))


@pytest.mark.usefixtures("measuring")
def test_predicted_and_measured_in_one_plot(tilefit, tmp_path: Path) -> None:
    command = ("curve", "gemm", "8:16", "64", "64", "--measure")
    ran = tilefit(*command, "--plot", "curve.svg")
    assert ran.code == 0
    assert "TN, TFLOP/s over m: predicted and measured" in ran.out
    (header,) = (line for line in ran.out.splitlines() if line.startswith("m "))
    assert "measured" in header
    assert "predictions are" in ran.out
    texts = [
        each.text
        for each in ElementTree.parse(tmp_path / "curve.svg").iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"TN", "TN measured"} <= {*texts}
    predicted, measured = json.loads(tilefit(*command, "--output-format", "json").out)["curves"]
    assert (predicted["provenance"], measured["provenance"]) == ("estimated", "measured")
    assert [point["size"] for point in measured["points"]] == list(range(8, 17))
    assert all(point["time_s"] == pytest.approx(2e-3) for point in measured["points"])


@pytest.mark.usefixtures("measuring")
def test_an_interrupted_measurement_shows_what_is_done_and_continues(
    tilefit, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilefit.measure import run as running

    real, measured = running.measure_op, []

    def interrupted(op, *arguments, **options):  # type: ignore[no-untyped-def]
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(op)
        return real(op, *arguments, **options)

    monkeypatch.setattr(running, "measure_op", interrupted)
    ran = tilefit("curve", "gemm", "8:16", "64", "64", "--measure", "--output-format", "json")
    assert ran.code == 130
    assert "the same command continues" in ran.err
    assert len(json.loads(ran.out)["curves"][1]["points"]) == 3
    measured.append(None)  # no further interruption
    ran = tilefit("curve", "gemm", "8:16", "64", "64", "--measure", "--output-format", "json")
    assert len(json.loads(ran.out)["curves"][1]["points"]) == 9
    assert len(measured) == 1 + 9, "three were in the store"


@pytest.mark.usefixtures("measuring", "model")
def test_a_model_is_measured_operation_by_operation(tilefit) -> None:
    ran = tilefit(
        *("curve", "net.py:build", "--hidden", "16:32:8", "--measure", "--optimizer", "none"),
        *("--output-format", "json"),
    )
    predicted, measured = json.loads(ran.out)["curves"]
    assert measured["provenance"] == "measured"
    assert [point["size"] for point in measured["points"]] == [16, 24, 32]
    assert all(
        m["time_s"] > p["time_s"] for m, p in zip(measured["points"], predicted["points"], strict=True)
    )
    assert any("each operation alone" in note for note in json.loads(ran.out)["notes"])


@pytest.mark.usefixtures("measuring")
def test_another_gpu_is_not_measured_here(tilefit) -> None:
    ran = tilefit("curve", "gemm", "8:16", "64", "64", "--measure", "--gpu", "l4")
    assert ran.code == 2
    assert "this machine's GPU, NVIDIA H200, not NVIDIA L4" in ran.err


@pytest.mark.parametrize("command", [("curve", "gemm", "1:8", "8", "8"), ("gemm", "8", "8", "8")])
def test_measuring_needs_a_gpu(tilefit, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran = tilefit(*command, "--measure", "--gpu", "h200")
    assert ran.code == 2
    assert "no CUDA GPU is visible" in ran.err
