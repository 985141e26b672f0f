"""The predicted peak of memory against that of the same step run for real.

Small models take a real step on the CPU, in training, in training with activation checkpointing, and in
inference, while every storage that an operation makes is counted until it is freed; the prediction sees
shapes alone. With ``--gpu`` peaks that were measured on GPUs (``whole_steps.py``) are predicted again, as
the allocator counts them.

    python benchmarks/memory_models.py --out benchmarks/results/memory_models.json
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tilefit.capture.optimizer import OPTIMIZERS
from tilefit.capture.run import capture
from tilefit.capture.torchvision_import import tolerated
from tilefit.ops.allocator import replayed

with tolerated():
    import timm
    import torchvision
    import transformers

TORCHVISION = [
    ("resnet18", 64), ("resnet50", 64), ("mobilenet_v2", 64), ("mobilenet_v3_small", 64),
    ("efficientnet_b0", 64), ("densenet121", 64), ("squeezenet1_1", 64), ("shufflenet_v2_x1_0", 64),
    ("regnet_y_400mf", 64), ("mnasnet0_5", 64), ("googlenet", 96), ("convnext_tiny", 64), ("swin_t", 64),
    ("resnext50_32x4d", 64), ("vit_b_32", 224),
]  # fmt: skip
TIMM = [
    "test_vit", "test_vit2", "test_vit3", "test_resnet", "test_efficientnet", "test_convnext",
    "test_convnext2",
    "test_byobnet", "test_mambaout", "test_nfnet", "test_efficientnet_evos", "mixer_s32_224",
    "poolformer_s12", "deit_tiny_patch16_224", "edgenext_xx_small", "ghostnet_050",
]  # fmt: skip
_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256,
    "vocab_size": 1000, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "attention_dropout": 0.0, "classifier_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
_GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 1000, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
TRANSFORMERS: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt2", "CausalLM", {**_GPT, "attn_pdrop": 0.0}),
    ("llama", "CausalLM", {**_SIZES, "num_key_value_heads": 2}),
    ("mistral", "CausalLM", {**_SIZES, "num_key_value_heads": 2}),
    ("qwen2", "CausalLM", {**_SIZES, "num_key_value_heads": 2}),
    ("qwen3", "CausalLM", {**_SIZES, "num_key_value_heads": 2, "head_dim": 16}),
    ("gemma", "CausalLM", {**_SIZES, "num_key_value_heads": 2, "head_dim": 16}),
    ("gpt_neox", "CausalLM", _SIZES),
    ("phi", "CausalLM", _SIZES),
    ("olmo", "CausalLM", _SIZES),
    ("stablelm", "CausalLM", {**_SIZES, "num_key_value_heads": 4}),
    ("bert", "MaskedLM", _SIZES),
    ("roberta", "MaskedLM", _SIZES),
    ("electra", "MaskedLM", {**_SIZES, "embedding_size": 64}),
    ("albert", "MaskedLM", {**_SIZES, "embedding_size": 32}),
    ("distilbert", "MaskedLM", {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 256, "vocab_size": 1000,
                                "dropout": 0.0, "attention_dropout": 0.0}),
    ("t5", "Seq2SeqLM", {"d_model": 64, "d_ff": 256, "num_layers": 3, "num_heads": 4, "d_kv": 16,
                         "vocab_size": 1000, "dropout_rate": 0.0, "decoder_start_token_id": 0}),
    ("bart", "Seq2SeqLM", {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 1000,
                           "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 256,
                           "decoder_ffn_dim": 256, "dropout": 0.0}),
]  # fmt: skip
IMAGES, TOKENS = 16, (4, 128)


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, until they are freed."""

    def __init__(self, held: list[torch.Tensor]) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: set[int] = set()
        for tensor in held:
            self._count(tensor)

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

        def freed() -> None:
            self._known.discard(key)
            self.bytes -= size

        weakref.finalize(storage, freed).atexit = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return out


class Checkpointed(nn.Module):
    """A module that is computed again in the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def checkpointed(model: nn.Module) -> nn.Module:
    """The model with every part of its longest lists of modules checkpointed."""
    model = deepcopy(model)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1]
    inner = {id(part) for each in lists for part in each.modules() if part is not each}
    for each in lists:
        if id(each) not in inner:
            for name, part in list(each.named_children()):
                if any(p.requires_grad for p in part.parameters()):
                    setattr(each, name, Checkpointed(part))
    return model


def models() -> Iterator[tuple[str, nn.Module, Any, Callable[[Any], torch.Tensor] | None]]:
    """Name, model, inputs and loss."""

    def of_classes(out: Any) -> torch.Tensor:
        logits = out if isinstance(out, torch.Tensor) else out[0]
        return cross_entropy(logits, torch.zeros_like(logits[:, 0], dtype=torch.long))

    for name, size in TORCHVISION:
        extra = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
        model = torchvision.models.get_model(name, **extra)
        yield f"torchvision:{name}", model, (torch.randn(IMAGES, 3, size, size),), of_classes
    for name in TIMM:
        model = timm.create_model(name)
        size = model.default_cfg["input_size"]
        yield f"timm:{name}", model, (torch.randn(IMAGES, *size),), of_classes
    # It reads values, to warn.
    transformers.PreTrainedModel.warn_if_padding_and_no_attention_mask = lambda *_: None
    for kind, head, sizes in TRANSFORMERS:
        config = transformers.AutoConfig.for_model(kind, **sizes)
        config.use_cache = False  # which a block that runs twice would add to twice
        config.pad_token_id = config.bos_token_id = config.eos_token_id = 1
        # With a bias that is trained CUDA has a kernel for attention, and the CPU has not.
        how = {"attn_implementation": "eager"} if kind == "t5" else {}
        model = getattr(transformers, f"AutoModelFor{head}").from_config(config, **how)
        ids = torch.randint(2, 1000, TOKENS)
        yield (
            f"transformers:{kind}",
            model,
            {"input_ids": ids, "labels": ids.clone()},
            None,
        )


def optimizer_of(inputs: Any) -> str:
    """Without state where it would outweigh the activations of small images."""
    return "adamw" if isinstance(inputs, dict) else "sgd"


def real_peak(model: nn.Module, inputs: Any, loss_of: Any, train: bool) -> tuple[int, int]:
    """Most bytes alive during the second step, and those held before it."""
    model.train(train)
    optimizer = OPTIMIZERS[optimizer_of(inputs)](model.parameters(), lr=1e-5, foreach=True)

    def step() -> None:
        with torch.set_grad_enabled(train):
            out = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
            if not train:
                return
            loss = loss_of(out) if loss_of else out["loss"]
        del out
        loss.backward()
        del loss
        optimizer.step()

    step()
    optimizer.zero_grad()
    gc.collect()
    state = [
        v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()
    ]
    held = [*model.parameters(), *model.buffers(), *state, *tree_leaves(inputs)]
    live = Live([each for each in held if isinstance(each, torch.Tensor)])
    held_bytes = live.bytes
    with live:
        step()
    return live.peak, held_bytes


def rows(only: str = "") -> Iterator[dict[str, Any]]:
    for name, model, inputs, loss in models():
        if only not in name:
            continue
        for how in ("training", "checkpointed", "inference"):
            train = how != "inference"
            each = checkpointed(model) if how == "checkpointed" else deepcopy(model)
            # Without random dropping, which the CPU does in other kernels.
            for part in each.modules():
                for attribute in ("p", "drop_prob"):
                    if isinstance(getattr(part, attribute, None), float):
                        setattr(part, attribute, 0.0)
            step = capture(each, inputs, loss=loss, train=train, optimizer=optimizer_of(inputs))
            real, held = real_peak(each, inputs, loss, train)
            peak = step.memory.timeline.peak()
            assert peak.total_bytes == step.memory.peak_bytes
            yield {
                "model": name,
                "step": how,
                "predicted_bytes": step.memory.peak_bytes,
                "real_bytes": real,
                "error": step.memory.peak_bytes / real - 1,
                "error_beyond_held": (step.memory.peak_bytes - real) / (real - held),
                "owners": dict(peak.owners),
            }


def on_gpus() -> Iterator[dict[str, Any]]:
    """Peaks that were measured on GPUs, predicted as the allocator counts them."""
    from whole_steps import captured, runs

    results = Path(__file__).parent / "results"
    for name in ("whole_steps", "whole_steps_h100", "whole_steps_inference_h100", "whole_steps_inference"):
        recorded = json.loads((results / f"{name}.json").read_text())
        known = {run.label: run for run in runs(recorded.get("infer", False), False)}
        for row in recorded["rows"]:
            run = known[row["model"]]
            step = captured(run)
            real = row["peak_gib"] * 2**30
            predicted = replayed(step.memory.timeline).peak_allocated_bytes
            yield {
                "model": row["model"],
                "step": "inference" if run.infer else "training",
                "gpu": recorded["gpu"],
                "predicted_bytes": predicted,
                "real_bytes": round(real),
                "error": predicted / real - 1,
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where to write the rows")
    parser.add_argument("--gpu", action="store_true", help="also predict what was measured on GPUs")
    parser.add_argument("--only", default="", help="models whose names contain this")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    result: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    for part, made in (("cpu", partial(rows, arguments.only)), ("gpu", on_gpus)):
        if part == "gpu" and not arguments.gpu:
            continue
        found = []
        for row in made():
            found.append(row)
            print(
                f"{row['model']:42} {row['step']:13} {row['predicted_bytes'] / 2**20:9.2f} of "
                f"{row['real_bytes'] / 2**20:9.2f} MiB  {row['error']:+.2%}  beyond what is held "
                f"{row.get('error_beyond_held', row['error']):+.2%}",
                flush=True,
            )
        off = sorted(abs(row["error"]) for row in found)
        result[part] = {"median_error": statistics.median(off), "worst_error": off[-1], "rows": found}
        print(f"{part}: median {statistics.median(off):.2%}, worst {off[-1]:.2%} of {len(off)} steps")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
