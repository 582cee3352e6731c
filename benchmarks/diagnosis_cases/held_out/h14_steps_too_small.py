"""bfloat16 weights and a rate so small that each update rounds to nothing."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama(layers=1)
if not HEALTHY:
    model = model.to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9 if not HEALTHY else 1e-5, weight_decay=0.0)
with workbench.watch(model, optimizer) as w:
    for step in range(20):
        batch = batch_of(step % 2, rows=2)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
