"""``tilefit plan``: the table, its JSON, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tilefit.report.split_plans import scaling

MODEL = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, 256), nn.Linear(256, 1000)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def build():
    return Net(), torch.randint(0, 1000, (2, 64))

"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TILEFIT_STORE", str(tmp_path / "store.db"))
    (tmp_path / "net.py").write_text(MODEL)
    return "net.py:build"


def test_json_of_two_gpus_with_prices_and_the_text(tilefit, model: str) -> None:
    command = ("plan", model, "--gpu", "h100-sxm", "--gpu", "l40s", "--gpus", "16", "--global-batch", "64")
    command += ("--layers", "8", "--price", "h100-sxm=2.5", "--price", "1", "--network", "8x400")
    ran = tilefit(*command, "--output-format", "json")
    assert ran.code == 0
    data = json.loads(ran.out, parse_constant=lambda text: pytest.fail(text))
    assert data["schema_version"] == 1
    assert (data["gpus"], data["global_batch"], data["tokens_per_sample"]) == (16, 64, 64)
    first, second = data["choices"]
    assert (first["price_per_gpu_hour"], second["price_per_gpu_hour"]) == (2.5, 1)
    for choice in data["choices"]:
        times = [split["time_s"] for split in choice["splits"]]
        assert times == sorted(times)
        slow = choice["slow_host"]  # these layers are so small that the host limits them
        assert 1.1 * times[0] < slow["time_s"] <= slow["times_as_slow"] * times[0] * 1.001
        for split in choice["splits"]:
            ranks = split["data"] * split["tensor"] * split["pipeline"] * split["context"]
            assert ranks == split["gpus"] == 16
            assert split["data"] * split["samples"] * split["micro_batches"] == 64
            assert sum(split["layers"]) == 8
            assert len(split["layers"]) == split["pipeline"] * split["chunks"]
            memory = split["memory_bytes"]
            assert memory.pop("total") == pytest.approx(sum(memory.values()))
    # A billion tokens are 64 x 64 of them a step.
    best = first["splits"][0]
    assert best["cost"] == pytest.approx(1e9 / 64**2 * best["time_s"] / 3600 * 16 * 2.5)
    lines = tilefit(*command, "--explain", "--launch", "all").out.splitlines()
    assert sum("On a host that takes 1.5 times as long" in line for line in lines) == 2
    for each in first["settings"].values():
        assert {*each.splitlines()} <= {*lines}  # they are copied: no line is broken
    text = " ".join(" ".join(lines).split())
    for said in ("The runner-up", "Strong scaling", "GPUs compared", "per G tokens", "torchrun --nnodes 2"):
        assert said in text


def test_less_memory_is_offered_and_made_where_it_is_asked_for(tilefit, model: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL.replace("1000", "160000"))
    command = ("plan", model, "--gpu", "h100-sxm", "--gpus", "1", "--global-batch", "64")
    plain = json.loads(tilefit(*command, "--output-format", "json").out)["choices"][0]
    offered = {tuple(each["choices"]): each for each in plain["memory_choices"]}
    asked = json.loads(tilefit(*command, "--memory", "fused-loss", "--output-format", "json").out)
    same = next(
        each for each in asked["choices"][0]["splits"] if each["split"] == offered["fused-loss",]["split"]
    )
    assert same == {name: offered["fused-loss",][name] for name in same}
    assert same["memory_bytes"]["total"] < plain["splits"][0]["memory_bytes"]["total"]
    assert any("With fused-loss (safe)" in note for note in asked["notes"])
    text = " ".join(tilefit(*command).out.split())
    assert "With less memory (--memory NAME)" in text
    assert "LigerFusedLinearCrossEntropyLoss" in text


def test_the_layers_of_each_stage_are_said_and_set(tilefit, model: str) -> None:
    command = ("plan", model, "--gpu", "h100-sxm", "--gpus", "2", "--nodes", "2", "--network", "1x1")
    command += ("--layers", "9", "--global-batch", "64", "--launch", "megatron")
    text = " ".join(tilefit(*command).out.split())
    said = text.partition("Layers of its stages: ")[2].partition(".")[0]
    first, second = (int(each) for each in said.split(", "))
    assert first + second == 9
    assert f'--pipeline-model-parallel-layout "Et*{first}|t*{second}L"' in text


def test_layers_that_are_asked_for_are_planned_of_a_model_of_transformers(tilefit) -> None:
    sizes = [f"--set={name}" for name in ("hidden_size=64", "num_attention_heads=2", "intermediate_size=128")]
    command = ("plan", "hf:llama", *sizes, "--gpus", "1", "--seq", "64", "--global-batch", "8")
    asked, configured = (tilefit(*command, *layers).out for layers in (("--layers", "48"), ()))
    assert "Captured with 2 of its 48 layers" in " ".join(asked.split())
    assert "Captured with 2 of its 32 layers" in " ".join(configured.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpus", "0"), "a plan over 0 GPUs"),
        (("--gpus", "12"), "12 GPUs do not fill machines of 8"),
        (("--gpus", "16", "--nodes", "3"), "3 machines do not share 16 GPUs evenly"),
        (("--gpus", "16", "--nodes", "1"), "16 GPUs in a machine"),
        (("--network", "pigeons"), "unknown network 'pigeons'"),
        (("--network", "infinband"), "Did you mean infiniband?"),
        (("--gpus", "8", "--global-batch", "0"), "a global batch of 0"),
        (("--price", "cheap"), "cannot read the price 'cheap'"),
        (("--price", "a100=2"), "a price of a100, which is not compared"),
        (("--set", "width"), "cannot read --set width"),
        (("--memory", "zip"), "nothing takes less memory by the name of zip"),
        (("--memory", "fused-loss", "--memory", "loss-in-chunks"), "two ways to do one thing"),
        (
            ("--gpus", "32", "--global-batch", "7"),
            "a global batch of 7 cannot be shared by 32",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_hint(
    tilefit, model: str, options: tuple[str, ...], message: str
) -> None:
    ran = tilefit("plan", model, "--gpu", "h100-sxm", *options)
    assert ran.code == 2
    assert message in " ".join(ran.err.split())
    assert "Traceback" not in ran.err


def test_an_interrupted_plan_goes_on_from_the_store(
    tilefit, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilefit.session import planning

    best, searched = planning._best, []

    def counted(common, item):
        searched.append(item[1])
        if len(searched) == 3:
            raise KeyboardInterrupt
        return best(common, item)

    monkeypatch.setattr(planning, "_best", counted)
    command = (
        "plan",
        model,
        "--gpu",
        "h100-sxm",
        "--gpus",
        "16",
        "--global-batch",
        "64",
        "--store",
        "kept.db",
    )
    assert tilefit(*command).code == 130
    assert searched == [16, 8, 4]
    resumed = tilefit(*command, "--output-format", "json")
    assert resumed.code == 0
    assert searched == [16, 8, 4, 4, 2, 1]
    assert "2 numbers of GPUs from the store" in resumed.err
    again = tilefit(*command, "--output-format", "json", "--fresh")
    assert searched[6:] == [16, 8, 4, 2, 1]
    assert json.loads(again.out)["choices"] == json.loads(resumed.out)["choices"]
    # Another batch is another plan.
    assert tilefit(*command[:-3], "32", *command[-2:]).code == 0
    assert len(searched) == 16


@pytest.mark.parametrize(
    ("times_s", "said"),
    [
        ({1: 8.0, 2: 4.0, 4: 2.5}, "Each doubling up to 4 GPUs gains 60 % or more."),
        ({1: 8.0, 2: 7.0}, "Beyond 1 GPU at this global batch a doubling gains less than 20 %."),
        (
            {4: 8.0, 8: 4.0, 12: 4.5},
            "Each doubling up to 8 GPUs gains 100 % or more. "
            "12 GPUs take longer than 8 at this global batch.",
        ),
        ({8: 4.0}, "Fewer GPUs do not hold the model."),
    ],
)
def test_what_is_said_of_scaling_holds_for_every_number_of_gpus(times_s: dict[int, float], said: str) -> None:
    frontier = [
        (count, SimpleNamespace(time=SimpleNamespace(time_s=each))) for count, each in times_s.items()
    ]
    assert scaling(SimpleNamespace(frontier=frontier)) == said  # type: ignore[arg-type]
