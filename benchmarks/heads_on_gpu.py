"""Compare ``fit-heads`` with PyTorch's own attention on a GPU: outputs and gradients, element type by element
type, beside how far both are from fp64.

    PYTHONPATH=src python benchmarks/heads_on_gpu.py --out FILE
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tilefit.fixes.changes.behaviour import Edits
from tilefit.fixes.kinds.attention.heads import FittedHeads

KINDS = {
    "fp64": (torch.float64, False),
    "fp32": (torch.float32, False),
    "autocast": (torch.float32, True),
    "bf16": (torch.bfloat16, False),
    "fp16": (torch.float16, False),
}


def learned(
    module: nn.Module, x: torch.Tensor, memory: torch.Tensor, amp: bool, masks: dict[str, Any]
) -> Any:
    """Output, and gradients of inputs and parameters."""
    x, memory = (each.detach().clone().requires_grad_() for each in (x, memory))
    given = x if memory.shape == x.shape else memory
    with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
        y = module(x, given, given, need_weights=False, **masks)[0]
    y.float().square().mean().backward()
    return [y, x.grad, *(p.grad for p in module.parameters())]


def errors(
    modules: list[nn.Module], inputs: list[torch.Tensor], masks: dict[str, Any], device: str
) -> dict[str, dict[str, float]]:
    """How far the plain and the fitted module are from fp64, by element type."""

    def run(module: nn.Module, dtype: torch.dtype, amp: bool) -> list[torch.Tensor]:
        def to(value: Any) -> Any:
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(device, dtype if is_float else None) if isinstance(value, torch.Tensor) else value

        given = {name: to(value) for name, value in masks.items()}
        made = learned(copy.deepcopy(module).to(device, dtype), *map(to, inputs), amp, given)
        return [each.detach().double() for each in made]

    exact = run(modules[0], torch.float64, False)
    found: dict[str, dict[str, float]] = {}
    for name, (dtype, amp) in KINDS.items():
        found[name] = {
            which: max(
                float((a - b).norm() / b.norm()) for a, b in zip(run(m, dtype, amp), exact, strict=True)
            )
            for which, m in zip(("plain", "fitted"), modules, strict=True)
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    rows = []
    for (width, heads), first, cross, masked in itertools.product(
        ((500, 10), (300, 6), (512, 8)), (True, False), (True, False), ("", "float", "bool", "causal")
    ):
        torch.manual_seed(0)
        plain = nn.MultiheadAttention(width, heads, batch_first=first)
        nn.init.normal_(plain.in_proj_bias, std=0.1)
        fitted = copy.deepcopy(plain)
        Edits().give(fitted, "", FittedHeads())
        length, keys = 40, 24 if cross else 40
        x, memory = torch.randn(3, length, width), torch.randn(3, keys, width)
        x, memory = (each if first else each.transpose(0, 1).contiguous() for each in (x, memory))
        drops = torch.arange(keys)[None] > torch.tensor([keys, keys // 2, 3])[:, None]
        ahead = torch.ones(length, keys).triu(1) > 0
        masks: dict[str, Any] = {}
        if masked == "float":
            masks = {"attn_mask": torch.randn(3 * heads, length, keys)}
        elif masked == "bool":
            masks = {"attn_mask": ahead, "key_padding_mask": drops}
        elif masked == "causal":
            masks = {"attn_mask": ahead, "is_causal": True}

        about = {"width": width, "heads": heads, "batch_first": first, "cross": cross, "mask": masked}
        row: dict[str, Any] = about | errors([plain, fitted], [x, memory], masks, options.device)
        rows.append(row)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    for name in KINDS:
        worst = max(rows, key=lambda row: row[name]["fitted"] / max(row[name]["plain"], 1e-12))
        print(name, worst)


if __name__ == "__main__":
    main()
