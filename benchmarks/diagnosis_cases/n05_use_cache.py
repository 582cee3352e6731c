"""Control: use_cache=True while training."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(40):
        batch = batch_of(step)
        loss = model(**batch, use_cache=True).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
