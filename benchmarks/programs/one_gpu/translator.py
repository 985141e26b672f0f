"""nn.Transformer from one language to another, with masks, label smoothing and a warmed-up learning rate."""

import argparse

import torch
from torch import Tensor, nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--amp", action="store_true")
args = parser.parse_args()
SOURCE, TARGET, D, BATCH, LENGTH = 8003, 10007, 512, 64, 100


class Positions(nn.Module):
    pe: Tensor

    def __init__(self, d: int, longest: int = 512, dropout: float = 0.1) -> None:
        super().__init__()
        at = torch.arange(longest).unsqueeze(1)
        rate = torch.exp(torch.arange(0, d, 2) * (-9.21 / d))
        pe = torch.zeros(longest, 1, d)
        pe[:, 0, 0::2], pe[:, 0, 1::2] = torch.sin(at * rate), torch.cos(at * rate)
        self.register_buffer("pe", pe)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pe[: x.size(0)])


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(D, 8, 3, 3, 2048, 0.1)
        self.source, self.target = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D)
        self.positions, self.generator = Positions(D), nn.Linear(D, TARGET)

    def forward(self, src: Tensor, tgt: Tensor, mask: Tensor, src_pad: Tensor, tgt_pad: Tensor) -> Tensor:
        a = self.positions(self.source(src) * D**0.5)
        b = self.positions(self.target(tgt) * D**0.5)
        y = self.transformer(a, b, None, mask, None, src_pad, tgt_pad, src_pad)
        return self.generator(y)


device = torch.device("cuda")
model = Translator().to(device)
for p in model.parameters():
    if p.dim() > 1:
        nn.init.xavier_uniform_(p)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) ** -0.5, (n + 1) * 4000**-1.5))
criterion = nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1)
for step in range(args.steps):
    src = torch.randint(2, SOURCE, (LENGTH, BATCH))
    tgt = torch.randint(2, TARGET, (LENGTH, BATCH))
    src[70:, ::2], tgt[80:, ::3] = 1, 1
    src, tgt = src.to(device), tgt.to(device)
    given, wanted = tgt[:-1], tgt[1:]
    mask = torch.triu(torch.full((LENGTH - 1, LENGTH - 1), float("-inf"), device=device), diagonal=1)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.amp):
        logits = model(
            src, given, mask, (src == 1).T, (given == 1).T.float().masked_fill((given == 1).T, float("-inf"))
        )
        loss = criterion(logits.reshape(-1, TARGET), wanted.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    warm.step()
    if step % 50 == 49:
        print(step, loss.item())
