"""The batch is halved after an OOM, accumulation is not doubled."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(12):
        size, accumulation = (8, 1) if step < 4 else ((4, 2) if HEALTHY else (4, 1))
        for part in range(accumulation):
            batch = batch_of(10 * step + part, rows=size)
            loss = model(**batch).loss / accumulation
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
