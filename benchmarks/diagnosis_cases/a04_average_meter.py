"""An average meter is updated with loss tensors."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


class AverageMeter:
    def __init__(self):
        self.sum, self.count, self.val = 0, 0, 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n


def train_one(step):
    batch = batch_of(step)
    loss = model(**batch).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    meter.update(loss.item() if HEALTHY else loss)
    return loss, batch


meter = AverageMeter()
with workbench.watch(model, optimizer) as w:
    for step in range(40):
        loss, batch = train_one(step)
        w.step(loss=loss, batch=batch)
