"""Tags of words: packed sequences through two LSTM layers in both directions, float32, sorted by length."""

import argparse

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()
WORDS, TAGS, BATCH = 20000, 17, 64


class Tagger(nn.Module):
    def __init__(self, width=300, hidden=400):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=0)
        self.lstm = nn.LSTM(width, hidden, 2, bidirectional=True, batch_first=True, dropout=0.33)
        self.out = nn.Linear(2 * hidden, TAGS)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.out(y)


model = Tagger().cuda()
optimizer = torch.optim.Adam(model.parameters())
criterion = nn.CrossEntropyLoss(ignore_index=-100)
lengths = torch.full((BATCH,), 30)
lengths[: BATCH // 2] = 45
for step in range(args.steps):
    words = pad_sequence([torch.randint(1, WORDS, (n,)) for n in lengths], batch_first=True).cuda()
    tags = torch.randint(TAGS, words.shape).cuda().masked_fill(words == 0, -100)
    scores = model(words, lengths)
    loss = criterion(scores.flatten(0, 1), tags.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    right = (scores.argmax(-1) == tags)[tags != -100].float().mean()
    print(step, loss.item(), right.item())
