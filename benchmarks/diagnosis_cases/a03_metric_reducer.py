"""A metric reducer adds up losses with their graph."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


class Reducer:
    def __init__(self):
        self.total, self.count = torch.zeros(()), 0

    def update(self, value):
        self.total += value
        self.count += 1


train_loss = Reducer()
with workbench.watch(model, optimizer) as w:
    for step in range(40):
        batch = batch_of(step)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        train_loss.update(loss.detach() if HEALTHY else loss)
        w.step(loss=loss, batch=batch)
