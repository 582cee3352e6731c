"""backward(create_graph=True) without resetting the gradients to None."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with workbench.watch(model, optimizer) as w:
    for step in range(40):
        batch = batch_of(step)
        loss = model(**batch).loss
        loss.backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
        norm = float(penalty.detach())
        optimizer.step()
        if HEALTHY:
            optimizer.zero_grad(set_to_none=True)
        w.step(loss=loss, batch=batch)
