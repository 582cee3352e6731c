"""Fits with SGD, runs out with Adam when its moments appear."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama(layers=3, hidden=256)
kind = torch.optim.SGD if HEALTHY else torch.optim.AdamW
optimizer = kind(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer, limit="32 MiB") as w:
    for step in range(4):
        batch = batch_of(step, rows=2, length=16)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
