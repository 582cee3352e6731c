"""After resuming, rows of this epoch are seen again."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

from torch.utils.data import DataLoader

rows = [batch_of(n, rows=1) for n in range(48)]
data = [{name: value[0] for name, value in row.items()} for row in rows]


def run(order, w):
    for batch in DataLoader(data, batch_size=4, sampler=order):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)


model = tiny_llama()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
order = torch.randperm(48, generator=torch.Generator().manual_seed(0)).tolist()
with workbench.watch(model, optimizer) as first:
    run(order[:24], first)
again = order[24:] if HEALTHY else torch.randperm(48, generator=torch.Generator().manual_seed(1)).tolist()[:24]
with workbench.watch(model, optimizer, continues=first) as w:
    run(again, w)
