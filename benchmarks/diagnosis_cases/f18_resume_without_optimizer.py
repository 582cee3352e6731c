"""A resumed run starts with an empty optimizer and schedule."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()


def parts():
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 20)


optimizer, scheduler = parts()
for step in range(6):
    loss = model(**batch_of(step)).loss
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
saved = optimizer.state_dict(), scheduler.state_dict()
optimizer, scheduler = parts()
if HEALTHY:
    optimizer.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[1])
findings = workbench.check({"model": model, "optimizer": optimizer, "scheduler": scheduler, "resumed_step": 6})
