"""Adam's epsilon is 0 in float16."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).half()
with torch.no_grad():
    model[0].weight[0] = -1.0
    model[0].bias[0] = -100.0
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4 if HEALTHY else 1e-8, foreach=False)
with workbench.watch(model, optimizer) as w:
    for step in range(5):
        x = torch.rand(4, 8).half()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=x)
