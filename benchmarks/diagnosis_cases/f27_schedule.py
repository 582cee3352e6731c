"""A schedule that is stepped four times per optimizer step."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 100)
with workbench.watch(model, optimizer, scheduler=scheduler) as w:
    for step in range(10):
        batch = batch_of(step)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        for _ in range(1 if HEALTHY else 4):
            scheduler.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
