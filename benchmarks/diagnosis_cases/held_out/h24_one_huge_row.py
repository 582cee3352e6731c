"""One corrupted row makes a step a hundred times too large; nothing clips."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with workbench.watch(model, optimizer) as w:
    for step in range(40):
        features = torch.randn(16, 10)
        target = features[:, :1].clone()
        if step == 25 and not HEALTHY:
            target[5] = 2e4
        loss = torch.nn.functional.mse_loss(model(features), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        w.step(loss=loss, batch={"features": features, "target": target})
