"""A running total of losses keeps every graph."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

total = 0.0
with workbench.watch(model, optimizer) as w:
    for step in range(40):
        batch = batch_of(step)
        out = model(**batch)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = total + (out.loss.detach() if HEALTHY else out.loss)
        w.step(loss=out.loss, batch=batch)
