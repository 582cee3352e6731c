"""Micro-batches of 3 and 63 label tokens count the same."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(4):
        micros = [batch_of(2 * step, rows=1, length=64), batch_of(2 * step + 1, rows=1, length=64)]
        micros[0]["labels"][:, 4:] = -100
        total = sum(int((m["labels"][:, 1:] != -100).sum()) for m in micros)
        for micro in micros:
            if HEALTHY:
                loss = model(**micro, num_items_in_batch=torch.tensor(total)).loss
            else:
                loss = model(**micro).loss / len(micros)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=micros[-1])
