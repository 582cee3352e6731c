"""Clipping with a norm that one bad gradient made infinite."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(4):
        batch = batch_of(step)
        loss = model(**batch).loss
        loss.backward()
        if step == 2 and not HEALTHY:
            model.model.layers[0].mlp.up_proj.weight.grad[0, 0] = float("inf")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
