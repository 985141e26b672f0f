"""``tilefit tour``: the main commands on a small language model that comes with tilefit, in two minutes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tilefit.cli.completion import GpuName

if TYPE_CHECKING:
    import torch

_MODEL = "tilefit.cli.tour:model"
#: What is said before each command, and the command.
_STOPS = (
    (
        "A language model with two sizes that nobody looked at twice: a vocabulary of 50257 and a hidden "
        "layer of 3001.\nNothing runs on a GPU: the step is captured on shapes; each operation is priced.",
        f"check {_MODEL} --amp bf16",
    ),
    (
        "Why does the vocabulary cost so much? The arithmetic in steps, and how it is cut into tiles.",
        f"explain {_MODEL} ALN002 --amp bf16",
    ),
    (
        "Which size would be better? A product can be asked about before there is a model.",
        "gemm 8192 3001 512",
    ),
    (
        "Change it: fixes are applied to the live model, and proven in fp64 to be the same function.",
        f"fix {_MODEL} --amp bf16",
    ),
)


def model() -> tuple[torch.nn.Module, torch.Tensor]:
    """The model of the tour, and its batch: int64[8,1024] tokens."""
    import torch
    from torch import nn

    layers = (nn.Embedding(50257, 512), nn.Linear(512, 3001), nn.GELU(), nn.Linear(3001, 512))
    return nn.Sequential(*layers, nn.LayerNorm(512), nn.Linear(512, 50257)), torch.empty(
        8, 1024, dtype=torch.int64, device="meta"
    )


def tour(gpu: GpuName = None) -> None:
    """Show check, explain, gemm and fix on a built-in model, each with its real output; two minutes at most.

    In a terminal each stop waits for Enter. Without --gpu it is an H200's.
    """
    from tilefit.cli.main import INTERRUPTED, command
    from tilefit.cost.priced import resolve

    resolve(gpu or "h200")  # a slip is told before anything is shown
    waits = sys.stdin.isatty() and sys.stdout.isatty()
    for number, (words, line) in enumerate(_STOPS, 1):
        arguments = f"{line} --gpu {gpu or 'h200'}"
        print(f"\n{number} of {len(_STOPS)}  {words}\n\n$ tilefit {arguments}\n", flush=True)
        run = command(line.split()[0])
        if run(arguments.split(), prog_name="tilefit", standalone_mode=False) == INTERRUPTED:
            raise KeyboardInterrupt
        if waits and number < len(_STOPS):
            input("\nEnter goes on, Ctrl-C ends. ")
    print("\nNow your own: tilefit check train.py --gpu h200, or tilefit check file.py:factory --gpu h200.")
