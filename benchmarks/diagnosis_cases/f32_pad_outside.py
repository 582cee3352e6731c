"""The pad token's id is the size of the vocabulary."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
if HEALTHY:
    model.resize_token_embeddings(301)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(3):
        batch = batch_of(step)
        batch["input_ids"][2, -3:] = 300
        batch["labels"][2, -3:] = -100
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
