"""Grouping by length puts the longest rows into one batch."""

import torch
from tiny import padded, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

import random

lengths = [12] * 60 + [160, 170, 165, 168]
rows = [torch.randint(1, 250, (length,)) for length in lengths]
order = list(range(len(rows)))
random.Random(0).shuffle(order)
groups = [order[i : i + 4] for i in range(0, len(order), 4)]
if not HEALTHY:
    order.sort(key=lambda index: lengths[index])
    groups = [order[i : i + 4] for i in range(0, len(order), 4)]
else:
    groups = [[index for index in group if lengths[index] < 100] or group[:1] for group in groups]
model = tiny_llama()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer, limit="6 MiB") as w:
    for group in groups:
        batch = padded([rows[index] for index in group])
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
