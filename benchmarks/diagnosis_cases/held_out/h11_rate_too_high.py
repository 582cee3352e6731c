"""Plain gradient descent on a regression with a rate far too high."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(12, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 if HEALTHY else 5.0)
with workbench.watch(model, optimizer) as w:
    for step in range(30):
        features = torch.randn(32, 12)
        loss = (model(features).squeeze(-1) - 3 * features[:, 0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        w.step(loss=loss, batch=features)
