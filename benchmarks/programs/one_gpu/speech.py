"""Speech recognition: spectrograms, strided convolutions, layers of attention and depthwise convolution, CTC."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()
WIDTH, HEADS, LAYERS, BATCH, FRAMES, LETTERS = 256, 4, 8, 32, 1200, 29


class Conformer(nn.Module):
    def __init__(self, d):
        super().__init__()
        feed = lambda: nn.Sequential(  # noqa: E731
            nn.LayerNorm(d),
            nn.Linear(d, 4 * d),
            nn.SiLU(),
            nn.Dropout(0.1),
            nn.Linear(4 * d, d),
            nn.Dropout(0.1),
        )
        self.feed1, self.feed2 = feed(), feed()
        self.norm1, self.attention = nn.LayerNorm(d), nn.MultiheadAttention(d, HEADS, 0.1, batch_first=True)
        self.norm2, self.point1 = nn.LayerNorm(d), nn.Conv1d(d, 2 * d, 1)
        self.depth, self.norm3 = nn.Conv1d(d, d, 31, padding=15, groups=d), nn.BatchNorm1d(d)
        self.point2, self.last = nn.Conv1d(d, d, 1), nn.LayerNorm(d)

    def forward(self, x, mask):
        x = x + 0.5 * self.feed1(x)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, key_padding_mask=mask, need_weights=False)[0]
        y = F.glu(self.point1(self.norm2(x).transpose(1, 2)), dim=1)
        x = x + self.point2(F.silu(self.norm3(self.depth(y)))).transpose(1, 2)
        return self.last(x + 0.5 * self.feed2(x))


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.shrink = nn.Sequential(
            nn.Conv2d(1, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU()
        )
        self.into = nn.Linear(64 * 20, WIDTH)
        self.layers = nn.ModuleList(Conformer(WIDTH) for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, LETTERS)

    def forward(self, spectra, lengths):
        x = self.shrink(spectra[:, None])
        x = self.into(x.permute(0, 2, 1, 3).flatten(2))
        mask = torch.arange(x.shape[1], device=x.device)[None] >= lengths[:, None]
        for layer in self.layers:
            x = layer(x, mask)
        return self.out(x)


device = "cuda"
model = Recogniser().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=max(args.steps, 10))
ctc = nn.CTCLoss(zero_infinity=True)
for step in range(args.steps):
    spectra = torch.randn(BATCH, FRAMES, 80).to(device)
    lengths = torch.randint(FRAMES // 8, FRAMES // 4, (BATCH,))
    letters = torch.randint(1, LETTERS, (BATCH, 120)).to(device)
    counts = torch.full((BATCH,), 120)
    optimizer.zero_grad()
    with torch.autocast(device, torch.bfloat16):
        logits = model(spectra, lengths.to(device))
    loss = ctc(logits.float().log_softmax(-1).transpose(0, 1), letters, lengths, counts)
    loss.backward()
    optimizer.step()
    schedule.step()
    print(step, loss.item())
