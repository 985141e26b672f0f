"""What is said of the backend that runs, and of cuDNN's algorithm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tilefit import gpus
from tilefit.errors import UsageError
from tilefit.nn import GRU, LSTM, convert, explain
from tilefit.rnn.call import Call
from tilefit.rnn.explain import algorithm

SMALL, STATIC, STANDARD = "PERSIST_STATIC_SMALL_H", "PERSIST_STATIC", "STANDARD"


HALF = Call(
    "lstm", torch.float16, None, False, 1024, 1024, 16, 256, 1, 1, 0, False, False, False,
    torch.float16, False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("cell", "changes", "gpu", "name", "failed", "change"),
    [
        ("lstm", {}, "h200", STATIC, "", ""),
        ("lstm", {"cudnn_dtype": torch.bfloat16}, "h200", STANDARD, "bf16", "fp16 autocast"),
        ("lstm", {"cudnn_dtype": torch.float32}, "h200", STANDARD, "fp16 only", "fp16 autocast"),
        ("lstm", {"hidden": 1000}, "h200", STANDARD, "hidden size 1000", "hidden size 1024"),
        ("lstm", {"input": 1000}, "h200", STANDARD, "input size 1000", "input to 1024"),
        ("lstm", {"batch": 12}, "h200", STANDARD, "batch 12", "mini-batch to 16"),
        ("lstm", {"layers": 2}, "h200", STANDARD, "2 layers", "module per layer"),
        ("lstm", {"directions": 2}, "h200", STANDARD, "two directions", "module per layer"),
        ("lstm", {"ragged": True}, "h200", STANDARD, "PackedSequence", "padded tensor"),
        ("lstm", {"hidden": 1152}, "h200", STANDARD, "exceeds 1024", ""),
        ("lstm", {"proj": 64}, "h200", STANDARD, "projection", ""),
        ("lstm", {"batch": 136}, "h200", STANDARD, "exceeds 128", ""),
        ("gru", {}, "h200", STANDARD, "GRU never", ""),
        ("gru", {"hidden": 192}, "h200", SMALL, "", ""),
        ("rnn_tanh", {"batch": 96}, "h200", STANDARD, "below 96", ""),
        ("rnn_tanh", {"batch": 96, "hidden": 768}, "h200", STATIC, "", ""),
        ("rnn_tanh", {"hidden": 384, "batch": 3}, "h200", SMALL, "", ""),
        ("lstm", {}, "t4", STANDARD, "Turing", ""),
        ("gru", {"batch": 16}, "v100-sxm2-16gb", STATIC, "", ""),
    ],
)
def test_cudnns_algorithm(
    cell: str, changes: dict[str, Any], gpu: str, name: str, failed: str, change: str
) -> None:
    found = algorithm(HALF._replace(cell=cell, **changes), gpus.get(gpu))
    assert found.forward == name
    assert failed in found.failed
    assert bool(found.failed) == bool(failed)
    assert change in found.change
    assert bool(found.change) == bool(change)


def test_forward_and_backward_choose_separately() -> None:
    found = algorithm(HALF._replace(input=192, hidden=192, batch=3, training=True), gpus.get("h200"))
    assert (found.forward, found.backward) == (SMALL, STANDARD)
    assert "hidden size 192" in found.failed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(8, 16, 2)
        self.decoder = nn.GRU(16, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.decoder(self.encoder(x)[0])[0]
        return out


def test_every_recurrent_module_is_explained() -> None:
    model = convert(Model())
    found = explain(model, torch.zeros(5, 3, 8), gpu="h200")
    assert [each.module for each in found] == ["encoder", "decoder"]
    text = str(found)
    assert "encoder: LSTM 8->16, 5 steps, batch 3, 2 layers, float32, training" in text
    assert "decoder: GRU 16->16, 3 steps, batch 5, float32, training" in text
    assert text.count("cudnn: the tensors are not on a CUDA device") == 2
    assert "cuDNN: PERSIST_STATIC_SMALL_H forward, PERSIST_STATIC_SMALL_H backward on h200" in text


def test_without_a_gpu_the_measurements_tell_what_would_run_on_the_one_named() -> None:
    x = torch.zeros(64, 4, 256, dtype=torch.bfloat16)
    module = LSTM(256, 256, dtype=torch.bfloat16)
    there = module.explain(x, gpu="h200").there
    assert there is not None
    assert there.backend == "persistent"
    assert f"on h200 persistent: {there.reason}" in str(module.explain(gpu="h200"))
    assert "us a step, cuDNN" in there.reason
    single = module.explain(x[:1], gpu="h200").there
    assert single is not None
    assert single.backend == "cell"
    for silent in (
        module.explain(x, gpu="l4"),  # where nothing was measured
        module.explain(x),
        LSTM(256, 256, proj_size=64, dtype=torch.bfloat16).explain(x, gpu="h200"),
        LSTM(256, 256, dtype=torch.bfloat16, backend="cudnn").explain(x, gpu="h200"),
    ):
        assert silent.there is None


def test_explanations_read_the_same_in_a_notebook() -> None:
    found = explain(convert(Model()), torch.zeros(5, 3, 8))
    assert repr(found) == str(found)


def test_a_module_tells_of_its_last_call() -> None:
    module = LSTM(8, 16)
    with pytest.raises(UsageError, match="no recurrent module"):
        module.explain()
    with torch.no_grad():
        module(torch.zeros(5, 3, 8), reset=torch.zeros(5, 3, dtype=torch.bool))
    found = module.explain()
    assert found.backend == "reference"
    assert "cannot reset" in found.reason
    assert "inference" in str(found)
    assert "name a known GPU" in str(found)
    assert module.explain(torch.zeros(7, 2, 8)).call.steps == 7


def test_a_call_in_a_cuda_graph_is_said_to_be_one() -> None:
    module = LSTM(8, 16)
    explanation = module.explain(torch.zeros(5, 3, 8))
    captured = replace(explanation, call=explanation.call._replace(captured=True))
    assert "training, in a CUDA graph" in str(captured)
    assert "CUDA graph" not in str(explanation)


def test_a_forced_backend_is_the_reason() -> None:
    assert GRU(8, 16, backend="reference").explain(torch.zeros(5, 3, 8)).reason == "asked for"


def test_a_model_that_was_not_converted() -> None:
    with pytest.raises(UsageError, match="no recurrent module") as error:
        explain(Model(), torch.zeros(5, 3, 8))
    assert "convert" in error.value.hint
