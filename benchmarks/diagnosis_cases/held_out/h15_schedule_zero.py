"""An integer division makes the schedule's factor 0 for the whole run."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
warm_up = 100
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: (step + 1) / warm_up if HEALTHY else (step + 1) // warm_up
)
features = torch.randn(64, 8)
target = features.sum(-1)
with workbench.watch(model, optimizer) as w:
    for step in range(40):
        loss = (model(features).squeeze(-1) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        w.step(loss=loss, batch=features)
