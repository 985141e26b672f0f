from __future__ import annotations

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

m                       TN
1     64.0 µs, 524 GFLOP/s
32   64.0 µs, 16.8 TFLOP/s
64   64.0 µs, 33.6 TFLOP/s
96    128 µs, 25.2 TFLOP/s
128   128 µs, 33.6 TFLOP/s
160   192 µs, 28.0 TFLOP/s
192   192 µs, 33.6 TFLOP/s
224   256 µs, 29.4 TFLOP/s
256   256 µs, 33.6 TFLOP/s

    knee m     time          rate  best m     time          rate  dips
TN      61  64.0 µs  32.0 TFLOP/s      64  64.0 µs  33.6 TFLOP/s     0

TN: the rate falls right after 64, 128, 192
TN: no size is slower than a larger one nearby.

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

TN: sizes slower than a larger one
n        sizes  slowest  next n     time  speedup  kernels
500–503      4   320 µs     504  64.0 µs    5.00x  sm80 -> sm90
505–511      7   320 µs     512  64.0 µs    5.00x  sm80 -> sm90
513–519      7   360 µs     520  72.0 µs    5.00x  sm80 -> sm90

NT: sizes slower than a larger one
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
    assert tilefit(*command, "curve.svg").out == ""
    assert ElementTree.parse(tmp_path / "curve.svg").getroot().tag.endswith("svg")
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
        (("1:8", "8", "8", "--output", "nowhere/curve.svg"), "cannot be written"),
        (("1:8", "8"), "tilefit curve gemm --help"),
    ],
)
def test_bad_input_is_named_with_exit_2(tilefit, arguments: tuple[str, ...], message: str) -> None:
    ran = tilefit("curve", "gemm", *(("--gpu", "h200") if "--gpu" not in arguments else ()), *arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert message in ran.err
    assert "Traceback" not in ran.err
