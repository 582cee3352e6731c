"""A distance is the root of a sum of squares, and one pair of rows is identical."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(20):
        left, right = torch.randn(8, 16), torch.randn(8, 16)
        if step == 9:
            right[3] = left[3]
        a, b = model(left), model(right)
        squares = ((a - b) ** 2).sum(dim=-1)
        distance = (squares + 1e-8).sqrt() if HEALTHY else squares.sqrt()
        loss = torch.relu(2.0 - distance).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        w.step(loss=loss, batch={"left": left, "right": right})
