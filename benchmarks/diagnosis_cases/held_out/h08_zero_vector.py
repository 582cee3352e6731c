"""Rows are normalised by their length, and one row is all zero."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

torch.manual_seed(0)
model = torch.nn.Linear(16, 8, bias=False)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(20):
        features = torch.randn(8, 16)
        if step == 6:
            features[2] = 0.0
        vectors = model(features)
        length = vectors.square().sum(-1, keepdim=True)
        unit = vectors / (length + 1.0 if HEALTHY else length)
        loss = (unit @ unit.T - torch.eye(8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        w.step(loss=loss, batch=features)
