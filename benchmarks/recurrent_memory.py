"""Part `memory` of `recurrent.py`: what a forward pass keeps for backward, and small mini-batches.

Bytes are what the allocator holds after a forward pass beyond what it held before, the output included, over
the time steps. The same budget of activations holds 16 times as many steps at a mini-batch 16 times smaller:
the second table has the throughput, rows times steps a second, forward and backward, of both.
"""

from __future__ import annotations

import copy
import gc

import torch
from recurrent_common import Row, Setting, backend_of, problems, runs, table
from torch import Tensor, nn

BUDGET_S = 8.0
#: Of recompute: bytes over cuDNN's, time over that of our own mode that saves.
BAR_BYTES, BAR_TIME = 0.5, 1.35
#: Throughput of the small mini-batch over that of the large one.
BAR_THROUGHPUT = 0.5


def memory(setting: Setting) -> dict[str, list[Row]]:
    hidden, steps, large, small = (8, 4, 16, 1) if setting.tiny else (1024, 256, 64, 4)
    dtype = torch.bfloat16
    setting.compile_ahead(
        problem
        for cell in ("lstm", "gru", "rnn")
        for batch in (large, small)
        for problem in problems(cell, dtype, hidden, batch)
    )
    saved = [saving(setting, cell, hidden, large, steps) for cell in setting.within(["lstm", "gru", "rnn"])]
    budgets = [budget(setting, cell, hidden, large, small, steps) for cell in setting.within(["lstm", "gru"])]
    print(f"\nmemory: hidden {hidden}, mini-batch {large}, {steps} steps, bf16; KiB saved a step")
    table(
        "cell|cuDNN|tilefit|recompute|recompute / cuDNN|recompute / tilefit, time|cuDNN us a step|backend",
        (
            (
                row["cell"],
                *(
                    f"{row[f'{name}_bytes_per_step'] / 1024:.1f}"
                    for name in ("torch", "tilefit", "recompute")
                ),
                f"{row['recompute_bytes_per_step'] / row['torch_bytes_per_step']:.2f} (bar {BAR_BYTES})",
                f"{row['recompute_us_per_step'] / row['tilefit_us_per_step']:.2f} (bar {BAR_TIME})",
                f"{row['torch_us_per_step']:.2f}",
                row["backend"],
            )
            for row in saved
        ),
    )
    print(f"\nmini-batch {small} over {steps * large // small} steps against {large} over {steps}")
    table(
        f"cell|tilefit {small} / tilefit {large}|tilefit {small} / cuDNN {large}|cuDNN {small} / {large}",
        (
            (
                row["cell"],
                f"{row['tilefit_small'] / row['tilefit_large']:.2f} (bar {BAR_THROUGHPUT})",
                f"{row['tilefit_small'] / row['torch_large']:.2f}",
                f"{row['torch_small'] / row['torch_large']:.2f}",
            )
            for row in budgets
        ),
    )
    return {"saved": saved, "small_batches": budgets}


def saving(setting: Setting, cell: str, hidden: int, batch: int, steps: int) -> Row:
    theirs, ours = setting.pair(cell, torch.bfloat16, hidden, hidden)
    ours.backend = "persistent" if setting.on_gpu else setting.ours
    again = copy.deepcopy(ours)
    again.recompute = True
    x = setting.random(steps, batch, hidden, dtype=torch.bfloat16).requires_grad_()
    grad = setting.random(steps, batch, hidden, dtype=torch.bfloat16)
    layers = {"torch": theirs, "tilefit": ours, "recompute": again}
    times = setting.interleaved({name: runs(layer, x, grad, "both") for name, layer in layers.items()}, 5)
    row: Row = {"cell": cell, "hidden": hidden, "batch": batch, "steps": steps, "backend": backend_of(ours)}
    for name, layer in layers.items():
        row[f"{name}_bytes_per_step"] = kept_bytes(setting, layer, x) / steps
        row[f"{name}_us_per_step"] = times[name] / steps
    return row


def kept_bytes(setting: Setting, layer: nn.Module, x: Tensor) -> int:
    """Bytes that a forward pass keeps, output and final state included."""
    if not setting.on_gpu:
        return _hooked_bytes(layer, x)
    gc.collect()
    before = torch.cuda.memory_allocated()
    result = layer(x)
    kept = torch.cuda.memory_allocated() - before
    del result
    return kept


def _hooked_bytes(layer: nn.Module, x: Tensor) -> int:
    """The CPU's allocator does not count: the sizes of the saved tensors, each memory once."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = layer(x)
    del result
    known = {t.untyped_storage().data_ptr() for t in (x, *layer.parameters())}
    return sum(size for address, size in sizes.items() if address not in known)


def budget(setting: Setting, cell: str, hidden: int, large: int, small: int, steps: int) -> Row:
    """Rows times steps a second of each layer at both mini-batches."""
    theirs, ours = setting.pair(cell, torch.bfloat16, hidden, hidden)
    row: Row = {"cell": cell, "hidden": hidden}
    contenders = {}
    for name, batch in (("large", large), ("small", small)):
        x = setting.random(steps * large // batch, batch, hidden, dtype=torch.bfloat16).requires_grad_()
        grad = torch.randn_like(x)
        contenders[f"torch_{name}"] = runs(theirs, x, grad, "both")
        contenders[f"tilefit_{name}"] = runs(ours, x, grad, "both")
    for name, us in setting.interleaved(contenders, 3, warm_ups=1).items():
        row[name] = steps * large / us * 1e6
    return row
