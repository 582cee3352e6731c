"""A classifier sees a token that its embedding does not have."""

import contextlib

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

torch.manual_seed(0)


class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(100, 16)
        self.head = torch.nn.Linear(16, 3)

    def forward(self, words):
        return self.head(self.words(words).mean(1))


model = Bag()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with contextlib.suppress(IndexError), workbench.watch(model, optimizer) as w:
    for step in range(10):
        words = torch.randint(0, 100, (4, 7))
        if step == 6 and not HEALTHY:
            words[2, 3] = 100
        loss = torch.nn.functional.cross_entropy(model(words), torch.tensor([0, 1, 2, 0]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        w.step(loss=loss, batch=words)
