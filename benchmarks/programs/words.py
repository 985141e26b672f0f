"""A language model of LSTM and GRU layers, trained by truncated backpropagation with plain SGD."""

import torch
from torch import nn


class Words(nn.Module):
    def __init__(self, vocabulary=10000, width=512):
        super().__init__()
        self.drop, self.embedding = nn.Dropout(0.2), nn.Embedding(vocabulary, width)
        self.lower, self.upper = nn.LSTM(width, width, 2, dropout=0.2), nn.GRU(width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens, states):
        y, lower = self.lower(self.drop(self.embedding(tokens)), states and states[0])
        y, upper = self.upper(y, states and states[1])
        return self.head(self.drop(y)).flatten(0, 1), (lower, upper)


def detached(states):
    return states.detach() if isinstance(states, torch.Tensor) else tuple(map(detached, states))


device = "cuda" if torch.cuda.is_available() else "cpu"
text = torch.randint(10000, (35 * 200 + 1, 40)).to(device)
model, states, total = Words().to(device), None, 0.0
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 1.0)
for step in range(200):
    inputs, targets = text[35 * step : 35 * step + 35], text[35 * step + 1 : 35 * step + 36].flatten()
    states = states and detached(states)
    scores, states = model(inputs, states)
    loss = criterion(scores, targets)
    model.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    total += loss.item()
