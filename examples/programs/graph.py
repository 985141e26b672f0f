"""A graph network that samples neighbours and gathers messages by index, written in plain PyTorch.

tilefit check examples/programs/graph.py --gpu h200
"""

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own, self.neighbours = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, edges):
        source, target = edges
        total = x.new_zeros(x.shape).index_add_(0, target, x[source])
        degree = torch.bincount(target, minlength=len(x)).clamp(min=1).unsqueeze(1)
        return self.own(x) + self.neighbours(total / degree)


class Net(nn.Module):
    def __init__(self, features, width, classes):
        super().__init__()
        self.layers = nn.ModuleList([Layer(features, width), Layer(width, width), Layer(width, classes)])

    def forward(self, x, edges):
        for layer in self.layers[:-1]:
            x = F.dropout(F.relu(layer(x, edges)), 0.5, self.training)
        return self.layers[-1](x, edges)


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
nodes, classes = 20000, 40
features = torch.randn(nodes, 128).to(device)
edges = torch.randint(nodes, (2, 200_000)).to(device)
labels = torch.randint(classes, (nodes,)).to(device)
train = torch.rand(nodes, device=device) < 0.6

model = Net(128, 256, classes).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(200):
    model.train()
    optimizer.zero_grad()
    out = model(features, edges)
    loss = F.cross_entropy(out[train], labels[train])
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        guessed = model(features, edges).argmax(dim=1)
        accuracy = (guessed[~train] == labels[~train]).float().mean().item()
    print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {accuracy:.3f}")
