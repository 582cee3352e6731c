"""Checkpointing stays on while validating in train mode."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
model.gradient_checkpointing_enable()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(8):
        model.train()
        batch = batch_of(step)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            if HEALTHY:
                model.eval()
            with torch.no_grad():
                model(**batch_of(100 + step))
        w.step(loss=loss, batch=batch)
