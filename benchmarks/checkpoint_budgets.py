"""Checkpointing that is chosen for a budget: is it met, and what does it cost beside that of everything?

Each model's training step, on shapes alone, is given budgets that lie a quarter, a half and three quarters of
the way from its peak to what is left when every block is checkpointed. The modules are chosen, the model is
changed, and the changed step is captured again: its peak is what counts, and the time of its operations.

    python benchmarks/checkpoint_budgets.py --out benchmarks/results/checkpoint_budgets.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tilefit.capture.targets import load
from tilefit.cost import estimate_step
from tilefit.cost.priced import resolve
from tilefit.cost.recompute import Recompute
from tilefit.fixes.changes.fix import Context
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds.checkpoint import Checkpointed, compute_again
from tilefit.options import StepOptions, TargetOptions

#: Target, sizes, the constructor's.
MODELS: list[tuple[str, dict[str, int], dict[str, int]]] = [
    ("hf:gpt2", {"batch": 8, "seq": 1024}, {"n_layer": 8}),
    ("hf:llama", {"batch": 2, "seq": 2048}, {"num_hidden_layers": 6, "hidden_size": 1024,
        "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000}),
    ("hf:qwen3", {"batch": 4, "seq": 1024}, {"num_hidden_layers": 6, "hidden_size": 1024,
        "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000}),
    ("hf:gpt_neox", {"batch": 4, "seq": 1024}, {"num_hidden_layers": 6, "hidden_size": 1024,
        "intermediate_size": 4096, "num_attention_heads": 16, "vocab_size": 32000}),
    ("hf:opt", {"batch": 8, "seq": 512}, {"num_hidden_layers": 6}),
    ("hf:bert", {"batch": 32, "seq": 512}, {"num_hidden_layers": 6}),
    ("hf:roberta", {"batch": 32, "seq": 256}, {"num_hidden_layers": 6}),
    ("hf:distilbert", {"batch": 32, "seq": 512}, {}),
    ("hf:electra", {"batch": 32, "seq": 512}, {"num_hidden_layers": 6}),
    ("hf:vit", {"batch": 64}, {"num_hidden_layers": 6}),
    ("hf:swin", {"batch": 64}, {}),
    ("hf:dinov2", {"batch": 32}, {"num_hidden_layers": 6}),
    ("torchvision:vit_b_16", {"batch": 64}, {}),
    ("torchvision:swin_t", {"batch": 64}, {}),
    ("torchvision:convnext_tiny", {"batch": 64}, {}),
    ("torchvision:resnet50", {"batch": 64}, {}),
    ("torchvision:vgg16_bn", {"batch": 64}, {}),
    ("torchvision:efficientnet_b0", {"batch": 64}, {}),
    ("timm:mixer_b16_224", {"batch": 64}, {}),
    ("timm:poolformer_s12", {"batch": 64}, {}),
]  # fmt: skip
SHARES = (0.25, 0.5, 0.75)


def blocks(model: nn.Module, possible: set[str]) -> list[str]:
    """Every part of the outermost lists of modules: what libraries checkpoint."""
    found: list[str] = []
    for path, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
        if is_list and not any(path.startswith(f"{each}.") for each in found):
            found += [f"{path}.{name}".lstrip(".") for name, _ in module.named_children()]
    # Stages are lists of blocks, and a list within a block is none.
    inner = {p for p in found if isinstance(model.get_submodule(p), nn.Sequential)}
    finer = [f"{p}.{name}" for p in inner for name, _ in model.get_submodule(p).named_children()]
    return [p for p in (*[p for p in found if p not in inner], *finer) if p in possible]


def gpu_s(run: Run, gpu: Any) -> tuple[int, float]:
    """Peak and time of all operations of a captured step."""
    step = run.capture()
    return step.memory.peak_bytes, sum(op.time_s for op in estimate_step(step, gpu).ops)


def rows(amp: str, gpu: Any) -> Iterator[dict[str, Any]]:
    for target, sizes, arguments in MODELS:
        loaded = load(target, TargetOptions(amp=amp, arguments=arguments, **sizes))
        run = Run(loaded.model, loaded.inputs, StepOptions(amp=amp), loss=loaded.loss)
        step = run.capture()
        estimate = estimate_step(step, gpu)
        before_s = sum(op.time_s for op in estimate.ops)
        peak = step.memory.peak_bytes
        search = Recompute(step, estimate.ops)
        every = blocks(run.model, set(search.parts))
        trial = run.on_meta()
        Checkpointed(tuple(every)).apply(trial)
        least, every_s = gpu_s(trial, gpu)
        if least >= peak:
            print(f"{target}: checkpointing all {len(every)} blocks frees nothing", flush=True)
            continue
        for share in SHARES:
            budget = peak - share * (peak - least)
            trial = run.on_meta()
            trial.memory_bytes = budget
            started = time.perf_counter()
            tried = 0
            for change in compute_again.find(Context(step, gpu, estimate, trial)):
                assert isinstance(change, Checkpointed)
                tried += 1
                edits = change.apply(trial)
                found, found_s = gpu_s(trial, gpu)
                edits.undo()
                if found <= budget:
                    break
            predicted = peak - change.saved_bytes
            yield {
                "model": target,
                "share": share,
                "peak_bytes": peak,
                "every_bytes": least,
                "blocks": len(every),
                "budget_bytes": round(budget),
                "modules": change.modules,
                "predicted_bytes": predicted,
                "captured_bytes": found,
                "error": predicted / found - 1,
                "met": found <= budget,
                "tries": tried,
                "extra_s": found_s - before_s,
                "predicted_extra_s": change.extra_s,
                "every_extra_s": every_s - before_s,
                "seconds": time.perf_counter() - started,
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where to write the rows")
    parser.add_argument("--amp", default="bf16", help="autocast type")
    parser.add_argument("--gpu", default="h100", help="the GPU that operations are priced for")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    gpu = resolve(arguments.gpu)[0]
    found = []
    for row in rows(arguments.amp, gpu):
        found.append(row)
        print(
            f"{row['model']:30} {row['share']:.2f}: {row['peak_bytes'] / 2**30:6.2f} -> "
            f"{row['captured_bytes'] / 2**30:6.2f} GiB (budget {row['budget_bytes'] / 2**30:6.2f}, predicted "
            f"{row['error']:+.2%}), {1e3 * row['extra_s']:6.2f} ms of {1e3 * row['every_extra_s']:6.2f} for "
            f"all {row['blocks']}, {len(row['modules'])} modules, try {row['tries']}, {row['seconds']:.1f} s",
            flush=True,
        )
    half = [row["extra_s"] / row["every_extra_s"] for row in found if row["share"] == 0.5]
    result = {
        "gpu": gpu.name,
        "amp": arguments.amp,
        "torch": torch.__version__,
        "met": sum(row["met"] for row in found) / len(found),
        "cost_at_half": {"median": statistics.median(half), "worst": max(half)},
        "at_half_the_cost_or_less": sum(cost <= 0.5 for cost in half) / len(half),
        "median_error": statistics.median(abs(row["error"]) for row in found),
        "worst_error": max(abs(row["error"]) for row in found),
        "rows": found,
    }
    print({name: value for name, value in result.items() if name != "rows"})
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
