"""A token whose embedding row was never trained."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
with torch.no_grad():
    model.model.embed_tokens.weight[77] = 0.01 if HEALTHY else float("nan")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(4):
        batch = batch_of(step)
        batch["input_ids"][batch["input_ids"] == 77] = 78
        if step == 2:
            batch["input_ids"][1, 5] = 77
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
