"""Real architectures: every product is known, and their number agrees with PyTorch's own counter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tilefit.capture import capture
from tilefit.capture.targets import Target, load
from tilefit.capture.torchvision_import import tolerated
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Attention, Conv, Recurrent, Step, Streaming
from tilefit.options import TargetOptions

EXAMPLES = Path(__file__).parents[2] / "examples" / "models.py"

# Target, what to change in the configuration, batch, sequence (or image size, where the model takes images).
TEXT: dict[str, tuple[dict[str, Any], int]] = {
    "gpt2": ({"n_layer": 2}, 64),
    "llama": (
        {
            "num_hidden_layers": 2,
            "hidden_size": 512,
            "intermediate_size": 1365,
            "vocab_size": 32001,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
        },
        64,
    ),
    "gemma2": ({"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024}, 64),
    "gpt_neox": (
        {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8},
        64,
    ),
    "opt": ({"num_hidden_layers": 2}, 64),
    "bert": ({"num_hidden_layers": 2}, 64),
    "roberta": ({"num_hidden_layers": 2}, 64),
    "albert": (
        {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8},
        64,
    ),
    "distilbert": ({"n_layers": 2}, 64),
    "deberta-v2": (
        {"num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1024},
        64,
    ),
    "electra": ({"num_hidden_layers": 2}, 64),
    "t5": ({"num_layers": 2}, 64),
    "bart": (
        {
            "encoder_layers": 2,
            "decoder_layers": 2,
            "d_model": 256,
            "encoder_ffn_dim": 512,
            "decoder_ffn_dim": 512,
            "vocab_size": 5000,
        },
        64,
    ),
    "whisper": ({"encoder_layers": 2, "decoder_layers": 2}, 32),
    "wav2vec2": ({"num_hidden_layers": 2, "layerdrop": 0.0}, 4000),
    "mixtral": (
        {
            "num_hidden_layers": 2,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
        },
        64,
    ),
    "mamba2": (
        {
            "num_hidden_layers": 1,
            "hidden_size": 256,
            "num_heads": 8,
            "head_dim": 64,
            "n_groups": 2,
            "chunk_size": 32,
        },
        64,
    ),
}
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
OWN = {
    "lstm_lm": ("int64[10,2]", "int64[10,2]"),
    "speech": ("float32[2,161,24]",),
    "unet": ("float32[2,3,32,32]",),
    "recommender": ("float32[64,13]", "int64[64,26]"),
    "odd_cnn": ("float32[2,3,32,32]",),
    "attention": ("float32[2,64,512]",),
    "odd_mlp": ("float32[31,479]",),
}
NAMES = [*(f"hf:{name}" for name in TEXT), *IMAGES, *(f"example:{name}" for name in OWN)]
# Their code reads values, which PyTorch's counter cannot give on shapes alone: it counts on real tensors.
ON_CPU = ("hf:bart", "hf:mixtral")


def _loaded(name: str, folder: Path, device: str = "meta") -> Target:
    kind, _, rest = name.partition(":")
    if kind == "example":
        return load(f"{EXAMPLES}:{rest}", TargetOptions(input=OWN[rest], on_cpu=device == "cpu"))
    image = name in IMAGES
    overrides, size = IMAGES[name] if image else TEXT[rest]
    if kind == "hf":
        path = folder / "config.json"
        path.write_text(json.dumps({"model_type": rest, **overrides}))
        name = f"hf:{path}"
    return load(
        name, TargetOptions(batch=2, on_cpu=device == "cpu", **{"image_size" if image else "seq": size})
    )


def _counted(target: Target, *, train: bool) -> int:
    """What PyTorch's counter finds in the same model. Attention takes the path of separate products."""
    model = target.model
    assert isinstance(model, torch.nn.Module)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with (
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
        torch.set_grad_enabled(train),
    ):
        inputs = target.inputs
        output = model.train(train)(**inputs) if isinstance(inputs, dict) else model.train(train)(*inputs)
        if train:
            loss = target.loss(output) if target.loss else getattr(output, "loss", output)
            loss.mean().backward()
    return int(counter.get_total_flops())


def _as_counted(step: Step) -> int:
    """The step's products by the conventions of PyTorch's counter, which differ in four things."""
    total = 0
    for entry in step.ops:
        op, flop = entry.op, entry.op.flop
        if isinstance(op, Streaming):
            continue  # it counts products only
        if isinstance(op, Attention):
            # It counts the whole square of a causal mask, and separate products keep the scores for the
            # backward pass, where the fused kernel computes them again.
            flop = replace(op, is_causal=False, direction=FORWARD).flop * (
                1 if op.direction == FORWARD else 2
            )
        elif isinstance(op, Conv) and op.direction == BACKWARD_WEIGHT:
            flop *= op.groups  # it takes the weight gradient of a grouped convolution for a dense one
        elif isinstance(op, Recurrent) and op.direction == BACKWARD_DATA:
            # Written out step by step, the zeros that the first step starts from get no gradient; cuDNN's do.
            layers = op.num_layers * op.directions
            flop -= 2 * layers * op.batch * op.gates * op.hidden_size * op.output_size
        total += flop
    return total


@pytest.mark.parametrize("name", NAMES)
def test_every_product_of_a_real_model_is_captured(name: str, tmp_path: Path) -> None:
    if not name.startswith("example"):
        with tolerated():
            pytest.importorskip("transformers" if name.startswith("hf") else "timm")
    target = _loaded(name, tmp_path)
    counted = _loaded(name, tmp_path, "cpu") if name in ON_CPU else target
    for train in (True, False):
        step = capture(target.model, target.inputs, train=train, optimizer="none", loss=target.loss)
        unknown = [
            entry for entry in step.ops if isinstance(entry.op, Streaming) and entry.op.role == "other"
        ]
        assert sum(entry.op.flop for entry in unknown) <= 0.01 * step.flop, {entry.name for entry in unknown}
        assert _as_counted(step) == pytest.approx(_counted(counted, train=train), rel=0.001)
