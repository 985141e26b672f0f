"""Check a small language model, change what the first finding says, and check again.

Run it with: python examples/pad_the_vocabulary.py
"""

from __future__ import annotations

import torch
from torch import nn

import tilefit


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, width: int = 768, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, nhead=12, dim_feedforward=4 * width, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.embed(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def main() -> None:
    tokens = torch.zeros(16, 1024, dtype=torch.int64)
    reports = {}
    for vocabulary in (50257, 50304):
        reports[vocabulary] = tilefit.check(LanguageModel(vocabulary), tokens, gpu="h200", amp="bf16")
    before, after = reports.values()
    print(before)
    print(f"Vocabulary 50257: {before.step.time_s * 1e3:.1f} ms a step")
    print(f"Vocabulary 50304: {after.step.time_s * 1e3:.1f} ms a step")


if __name__ == "__main__":
    main()
