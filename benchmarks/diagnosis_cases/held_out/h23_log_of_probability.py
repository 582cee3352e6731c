"""A binary loss takes the logarithm of a saturated probability."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(16):
        features = torch.randn(16, 10) * (3000.0 if step == 11 else 1.0)
        target = (features[:, :1] > 0).float()
        scores = model(features)
        if HEALTHY:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, target)
        else:
            chance = torch.sigmoid(scores)
            loss = -(target * chance.log() + (1 - target) * (1 - chance).log()).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        w.step(loss=loss, batch=features)
