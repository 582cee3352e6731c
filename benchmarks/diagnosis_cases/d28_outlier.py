"""One batch with a huge loss, no clipping."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(14):
        batch = batch_of(step)
        loss = model(**batch).loss
        if step == 9 and not HEALTHY:
            loss = loss * 1000
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
