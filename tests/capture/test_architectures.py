"""Real architectures: every product is known, and their number agrees with PyTorch's own counter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tilefit.capture import capture
from tilefit.capture.targets import InputOptions, Target, load
from tilefit.ops import BACKWARD_WEIGHT, FORWARD, Attention, Conv, Step, Streaming

EXAMPLES = Path(__file__).parents[2] / "examples" / "models.py"

# Target, what to change in the configuration, batch, sequence (or image size, where the model takes images).
TEXT: dict[str, tuple[dict[str, Any], int]] = {
    "gpt2": ({"n_layer": 2}, 64),
    "llama": ({"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1365, "vocab_size": 32001,
               "num_attention_heads": 8, "num_key_value_heads": 2}, 64),
    "gemma2": ({"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024}, 64),
    "gpt_neox": ({"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8},
                 64),
    "opt": ({"num_hidden_layers": 2}, 64),
    "bert": ({"num_hidden_layers": 2}, 64),
    "roberta": ({"num_hidden_layers": 2}, 64),
    "albert": ({"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8},
               64),
    "distilbert": ({"n_layers": 2}, 64),
    "deberta-v2": ({"num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8,
                    "intermediate_size": 1024}, 64),
    "electra": ({"num_hidden_layers": 2}, 64),
    "t5": ({"num_layers": 2}, 64),
    "bart": ({"encoder_layers": 2, "decoder_layers": 2}, 64),
    "whisper": ({"encoder_layers": 2, "decoder_layers": 2}, 32),
    "wav2vec2": ({"num_hidden_layers": 2}, 4000),
    "mixtral": ({"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
                 "num_key_value_heads": 2}, 64),
    "mamba2": ({"num_hidden_layers": 1, "hidden_size": 256, "num_heads": 8, "head_dim": 64, "n_groups": 2,
                "chunk_size": 32}, 64),
}  # fmt: skip
IMAGES: dict[str, tuple[dict[str, Any], int]] = {
    "hf:vit": ({"num_hidden_layers": 2}, 224),
    "hf:swin": ({"depths": [1, 1, 1, 1]}, 224),
    "hf:segformer": ({}, 64),
    "torchvision:resnet18": ({}, 64),
    "torchvision:mobilenet_v3_small": ({}, 64),
    "torchvision:efficientnet_b0": ({}, 64),
    "torchvision:fcn_resnet50": ({}, 64),
    "timm:convnext_atto": ({}, 64),
    "timm:mixer_s32_224": ({}, 224),
    "timm:regnety_002": ({}, 64),
    "timm:deit_tiny_patch16_224": ({}, 224),
}
OWN = ("lstm_lm", "speech", "unet", "recommender", "odd_cnn", "attention", "odd_mlp")
NAMES = [*(f"hf:{name}" for name in TEXT), *IMAGES, *(f"example:{name}" for name in OWN)]


def _loaded(name: str, folder: Path) -> Target:
    kind, _, rest = name.partition(":")
    if kind == "example":
        return load(f"{EXAMPLES}:{rest}", InputOptions())
    overrides, size = IMAGES[name] if name in IMAGES else TEXT[rest]
    if kind == "hf":
        path = folder / "config.json"
        path.write_text(json.dumps({"model_type": rest, **overrides}))
        name = f"hf:{path}"
    sizes = {"image_size": size} if name in IMAGES or f"hf:{rest}" in IMAGES else {"seq": size}
    return load(name, InputOptions(batch=2, **sizes))
