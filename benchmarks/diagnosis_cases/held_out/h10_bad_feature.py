"""A numeric column of the table holds an Inf."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

torch.manual_seed(0)
table = torch.randn(200, 12)
if not HEALTHY:
    table[77, 5] = float("inf")
answers = torch.randn(200)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(table, answers), batch_size=10)
model = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for features, target in loader:
        loss = torch.nn.functional.mse_loss(model(features).squeeze(-1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        w.step(loss=loss, batch={"features": features, "target": target})
