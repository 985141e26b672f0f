"""Part `convergence` of `recurrent.py`: a character model trained with each backend, three seeds each.

The text is this package's own Python source. A two-layer LSTM learns to predict the next byte under bf16
autocast; the loss is that of the last twentieth of the text, in nats a byte. Every backend sees the same
first weights and the same batches for a seed.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from recurrent_common import Row, Setting, problems, table
from torch import Tensor, nn

import tilefit
import tilefit.nn as tnn

BUDGET_S = 12.0
SEEDS = (0, 1, 2)


class CharacterModel(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.lstm = nn.LSTM(64, hidden, 2)
        self.head = nn.Linear(hidden, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Mean loss of predicting each next byte of text [steps, batch]."""
        out, _ = self.lstm(self.embedding(text[:-1]))
        return F.cross_entropy(self.head(out).flatten(0, 1), text[1:].flatten())


def text_of(setting: Setting) -> Tensor:
    files = sorted(Path(tilefit.__file__).parent.rglob("*.py"))
    content = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(setting.device, torch.long)


def columns(text: Tensor, starts: Tensor, steps: int) -> Tensor:
    return text[starts + torch.arange(steps + 1, device=text.device)[:, None]]


def trained(setting: Setting, text: Tensor, contender: str, seed: int) -> float:
    """The loss on the held-out text after training."""
    hidden, steps, batch, updates = (8, 4, 2, 3) if setting.tiny else (256, 64, 32, 300)
    torch.manual_seed(seed)
    model = CharacterModel(hidden).to(setting.device)
    if contender != "torch":
        backend = "persistent" if setting.on_gpu else "reference"
        tnn.convert(model, backend=backend, recompute=contender == "recompute")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    held_out = len(text) // 20
    generator = torch.Generator().manual_seed(seed)
    for _ in range(updates):
        starts = torch.randint(len(text) - held_out - steps - 1, (batch,), generator=generator)
        optimizer.zero_grad()
        with torch.autocast(setting.device.type, torch.bfloat16):
            loss = model(columns(text, starts.to(text.device), steps))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    starts = torch.linspace(len(text) - held_out, len(text) - steps - 1, batch).long().to(text.device)
    with torch.no_grad(), torch.autocast(setting.device.type, torch.bfloat16):
        return float(model(columns(text, starts, steps)))


def convergence(setting: Setting) -> list[Row]:
    text = text_of(setting)
    if not setting.tiny:
        setting.compile_ahead(problems("lstm", torch.bfloat16, 256, 32))
    cases = [(seed, name) for seed in SEEDS for name in ("torch", "tilefit", "recompute")]
    rows: list[Row] = []
    for seed, name in setting.within(cases):
        rows.append({"contender": name, "seed": seed, "loss": trained(setting, text, name, seed)})
    losses: dict[str, list[float]] = {}
    for row in rows:
        losses.setdefault(row["contender"], []).append(row["loss"])
    means = {name: statistics.fmean(found) for name, found in losses.items()}
    print("\nconvergence: loss on held-out text, nats a byte; the noise is the seeds' standard deviation")
    table(
        "contender|losses|mean|noise|mean less torch's",
        (
            (
                name,
                " ".join(f"{loss:.4f}" for loss in found),
                f"{means[name]:.4f}",
                f"{statistics.stdev(found):.4f}" if len(found) > 1 else "-",
                f"{means[name] - means['torch']:+.4f}",
            )
            for name, found in losses.items()
        ),
    )
    return rows
