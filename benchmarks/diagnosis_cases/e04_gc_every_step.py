"""gc.collect() in every step of a process with many objects."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

import gc

objects = [[index] for index in range(400_000)]
model = tiny_llama()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(12):
        batch = batch_of(step)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not HEALTHY:
            gc.collect()
        w.step(loss=loss, batch=batch)
