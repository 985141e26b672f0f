"""Real models with few layers, captured once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilefit.capture.child import capture_target
from tilefit.ops import Step
from tilefit.options import TargetOptions


def _captured(target: str, *, train: bool = True, **sizes: int) -> Step:
    options = TargetOptions(batch=8, seq=128, amp="bf16", train=train, arguments=sizes)
    return capture_target(target, options)


@pytest.fixture(scope="session")
def gpt2() -> Step:
    """Two layers, 12 heads, 768 features, a tied head over 50257 tokens; a training step."""
    return _captured("hf:gpt2", n_layer=2)


@pytest.fixture(scope="session")
def gpt2_of_25_heads() -> Step:
    return _captured("hf:gpt2", n_layer=1, n_head=25, n_embd=1600)


@pytest.fixture(scope="session")
def gpt2_inference() -> Step:
    return _captured("hf:gpt2", train=False, n_layer=1)


@pytest.fixture(scope="session")
def llama() -> Step:
    """Three layers, 16 query heads and 4 key/value heads of 64, gate and up projections of 2752."""
    return _captured(
        "hf:llama",
        hidden_size=1024,
        intermediate_size=2752,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
    )


@pytest.fixture(scope="session")
def bert_written_out(tmp_path_factory: pytest.TempPathFactory) -> Step:
    """Two layers, 12 heads, attention as two products."""
    config: Path = tmp_path_factory.mktemp("bert") / "config.json"
    config.write_text(
        json.dumps({"model_type": "bert", "num_hidden_layers": 2, "attn_implementation": "eager"})
    )
    return _captured(f"hf:{config}")
