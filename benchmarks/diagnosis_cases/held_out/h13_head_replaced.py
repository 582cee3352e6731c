"""The head is replaced after the optimizer was built."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 64))
if HEALTHY:
    model[2] = torch.nn.Linear(32, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if not HEALTHY:
    model[2] = torch.nn.Linear(32, 8)
with workbench.watch(model, optimizer) as w:
    for step in range(12):
        ids = torch.randint(0, 64, (4, 10))
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten() % 8)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        w.step(loss=loss, batch=ids)
