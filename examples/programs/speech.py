"""Speech recognition by CTC: sequences of different lengths, packed for a bidirectional LSTM.

tilefit check examples/programs/speech.py --gpu h200
"""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset


class Utterances(Dataset):
    def __len__(self):
        return 2048

    def __getitem__(self, index):
        random.seed(index)
        return torch.randn(random.randint(200, 400), 80), torch.randint(1, 29, (random.randint(10, 40),))


def collate(pairs):
    pairs.sort(key=lambda pair: -len(pair[0]))
    sounds, texts = zip(*pairs)  # noqa: B905
    lengths = torch.tensor([len(each) for each in sounds])
    return pad_sequence(sounds, True), lengths, torch.cat(texts), torch.tensor([len(t) for t in texts])


class Recognizer(nn.Module):
    def __init__(self, classes=29, width=512):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(80, width, 3, 2, 1), nn.BatchNorm1d(width), nn.ReLU())
        self.lstm = nn.LSTM(width, width // 2, 3, batch_first=True, bidirectional=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x, lengths):
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        lengths = (lengths + 1) // 2
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True)
        y, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(y).log_softmax(-1), lengths


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(Utterances(), 32, shuffle=True, collate_fn=collate, num_workers=4, pin_memory=True)
    model = Recognizer().to(device)
    criterion = nn.CTCLoss(zero_infinity=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=10 * len(loader))
    for epoch in range(10):
        for step, (sounds, lengths, texts, text_lengths) in enumerate(loader):
            sounds, texts = sounds.to(device), texts.to(device)
            optimizer.zero_grad()
            scores, lengths = model(sounds, lengths)
            loss = criterion(scores.transpose(0, 1), texts, lengths, text_lengths)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 400)
            if not torch.isfinite(norm):
                continue
            optimizer.step()
            schedule.step()
            if step % 10 == 0:
                print(f"epoch {epoch} step {step}: {loss.item():.3f}, norm {norm:.2f}")


if __name__ == "__main__":
    main()
