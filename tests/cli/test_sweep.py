"""What ``tilefit sweep`` and the split of ``tilefit check`` say."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from inline_snapshot import snapshot

MODEL = """\
import torch
from torch import nn

def build(width=512, heads=8):
    if width % heads:
        raise ValueError(f"{width} features do not divide into {heads} heads")
    layers = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    return nn.Sequential(*layers), torch.empty(64, width)
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TILEFIT_STORE", str(tmp_path / "store.db"))
    (tmp_path / "model.py").write_text(MODEL)
    return "model.py:build"


def test_text_with_impossible_points(tilefit, model: str) -> None:
    ran = tilefit("sweep", model, "--over", "width=512,513", "--over", "batch=64..128", "--gpu", "l4")
    assert ran.code == 0
    assert "highest rate: width 512, batch 128:" in " ".join(ran.out.split())
    assert "no step, width 513, batch 64 and 1 more: model.py:build raised ValueError: 513 features do" in (
        " ".join(ran.out.split())
    )
    assert "The inputs of model.py:build are given: the step was captured with 64 samples" in (
        " ".join(ran.out.split())
    )


def test_a_long_frontier_says_what_is_left_out(tilefit, model: str) -> None:
    grid = ("--over", "batch=1024..65536", "--over", "heads=1,2,4,8", "--over", "compile=off,on")
    command = ("sweep", model, *grid, "--gpu", "l4")
    short, long = tilefit(*command).out, tilefit(*command, "--all").out
    (more,) = re.findall(r"nor in less memory. (\d+) more points: --all", short)
    tables = (text.partition("nor in less")[0] for text in (short, long))
    listed = [len(re.findall(r" (?:on|off) .* ms ", table)) for table in tables]
    assert listed[1] - listed[0] == int(more)
    assert "more points" not in long


def test_the_best_point_is_in_a_shortened_table(tilefit, model: str) -> None:
    sweep = ("sweep", model, "--over", "batch=1..1024", "--over", "gpu=h200,l4,t4")
    ran = tilefit(*sweep)
    found = re.search(r"^highest throughput: batch (\d+), (\w+): ", ran.out, re.MULTILINE)
    assert found is not None
    assert re.search(r"\d+ of \d+ points: --all", ran.out)
    table = ran.out[ran.out.rindex("80 % interval") :]
    assert re.search(rf"^{found[1]} +{found[2]} ", table, re.MULTILINE)


def test_json_then_the_store(tilefit, model: str) -> None:
    command = ("sweep", model, "--over", "batch=1..256", "--over", "gpu=h200,l4", "--output-format", "json")
    first = tilefit(*command)
    data = json.loads(first.out)
    assert (first.code, len(data["points"])) == (0, 18)
    assert data["axes"] == {"batch": [1, 2, 4, 8, 16, 32, 64, 128, 256]}
    point = data["points"][data["best"]]
    assert point["items_per_s"] == max(each["items_per_s"] for each in data["points"])
    assert point["items_per_s"] == pytest.approx(point["samples"] / point["time_s"])
    assert set(data["frontier"]) == {"latency", "memory"}
    again = tilefit(*command)
    assert again.out == first.out
    assert "18 of 18 points are from the store; --fresh computes them again." in again.err


def test_csv_and_a_picture(tilefit, model: str, tmp_path: Path) -> None:
    ran = tilefit(
        *("sweep", model, "--over", "batch=1..256", "--over", "amp=off,bf16", "--gpu", "h200"),
        *("--output", "points.csv", "--plot", "plot.svg"),
    )
    assert (ran.code, ran.out) == (0, "")
    rows = list(csv.DictReader((tmp_path / "points.csv").open()))
    assert [(row["batch"], row["amp"]) for row in rows[:3]] == [("1", "off"), ("1", "bf16"), ("2", "off")]
    picture = ElementTree.fromstring((tmp_path / "plot.svg").read_text())
    texts = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"amp off", "amp bf16", "samples/s"} <= {*texts}


def test_best_batch_without_a_gpu(tilefit, model: str) -> None:
    ran = tilefit("sweep", model, "--best-batch", "--over", "batch=1..64", "--gpu", "h200")
    assert "best batch that fits: batch 64:" in " ".join(ran.out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h200"], "nothing varies\n  Write --over batch=1..512, or --best-batch."),
        (["--over", "batch=1,2", "--batch", "4"], "batch varies, and --batch fixes it"),
        (["--over", "gpu=h200", "--gpu", "l4"], "gpu varies, and --gpu fixes it"),
        (["--over", "amp=off,bf16", "--amp", "fp16"], "amp varies, and --amp fixes it"),
        (["--over", "compile=off,on", "--compile"], "compile varies, and --compile fixes it"),
        (["--over", "dtype=fp32,bf16", "--no-tf32"], "dtype varies, and --tf32 fixes it"),
        (["--over", "tensor_parallel=2", "--tensor-parallel", "4"], "--tensor-parallel fixes it"),
        (["--over", "optimizer=sgd", "--infer"], "--over optimizer has no effect: --infer runs no optimizer"),
        (["--over", "batch=,"], "--over batch: no value is given"),
        (["--tensor-parallel", "two"], "--tensor-parallel: 'two' is neither a size nor a range"),
        (["--over", "batch=1,2", "--output-file", "a.svg"], "pictures are drawn by --plot"),
        (["--over", "amp=off", "--over", "dtype=fp32"], "amp and dtype say the same thing"),
        (["--over", "batch=1,2", "--input", "x: float32[4,512]"], "--input fixes the inputs' sizes"),
        (["--best-batch", "--over", "width=8"], "--best-batch varies the batch alone, not width"),
        (["--tensor-parallel", "2", "--measure"], "a split over GPUs is predicted, not measured"),
        (["--over", "batch=1,2", "--plot", "a.pdf"], "a picture is an SVG or a PNG"),
        (["--over", "compile=on,off", "--gpu", "h200", "--plot", "a.svg"], "there is nothing to draw"),
        (["--over", "nope=1,2", "--gpu", "h200"], "model.py:build has no size 'nope' to set"),
        (["--over", "width=513", "--gpu", "h200"], "513 features do not divide into 8 heads"),
    ],
)
def test_what_cannot_be_done_says_so(tilefit, model: str, arguments: list[str], message: str) -> None:
    ran = tilefit("sweep", model, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


def test_a_check_of_one_rank(tilefit, model: str) -> None:
    ran = tilefit(
        *("check", model, "--gpu", "h200", "--amp", "bf16", "--output-format", "json"),
        *("--tensor-parallel", "2", "--data-parallel", "2"),
    )
    data = json.loads(ran.out)
    notes = [re.sub(r"[\d.]+ [mµ]s", "…", note) for note in data["notes"][-3:]]
    assert notes == snapshot(
        [
            "Split: tensor 2, data 2; 4 GPUs, of which this is one.",
            "The whole step on NVIDIA H200 SXM 141GB: …, of which communication ….",
            "Sizes are those of one of 2 tensor-parallel ranks. Inferred from the step: 1 MLP by features.",
        ]
    )
    assert data["step"]["parameter_count"] < 512 * 4096 * 0.51


def test_a_check_of_a_split_that_does_not_divide(tilefit, model: str) -> None:
    ran = tilefit("check", model, "--gpu", "h200", "--data-parallel", "3")
    assert ran.code == 2
    assert "a batch of 64 does not split into 3 replicas" in ran.err


def test_a_narrow_terminal_cuts_no_number_off(tilefit, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    ran = tilefit("sweep", model, "--over", "batch=1..4", "--over", "amp=off,bf16", "--gpu", "h200")
    assert max(map(len, ran.out.splitlines())) <= 40
    assert "…" not in ran.out


def test_what_a_target_does_not_depend_on(tilefit, model: str) -> None:
    ran = tilefit("sweep", model, "--over", "seq=1,2", "--gpu", "h200")
    assert ran.code == 2
    assert "Vary a size it takes: the batch, or a size of the model itself." in ran.err
    assert "--set" not in ran.err  # an option of another command
