"""One batch of long rows does not fit where all before did."""

import contextlib

import torch
from tiny import padded, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama(layers=2)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with contextlib.suppress(torch.OutOfMemoryError), workbench.watch(model, optimizer, limit="6 MiB") as w:
    for step in range(12):
        lengths = [24, 22, 200 if step == 7 and not HEALTHY else 23, 24]
        batch = padded([torch.randint(3, 256, (length,)) for length in lengths])
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
