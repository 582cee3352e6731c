"""A large vocabulary: logits and their copies fill the memory."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama(vocab=8192)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer, limit="96 MiB" if HEALTHY else "24 MiB") as w:
    for step in range(3):
        batch = batch_of(step, rows=4, length=64)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
