"""One MLP overflows float16; bfloat16 carries it."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
with torch.no_grad():
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(model.model.layers[1].mlp, name).weight.mul_(300)
model = model.to(torch.bfloat16 if HEALTHY else torch.float16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

with workbench.watch(model, optimizer) as w:
    for step in range(4):
        batch = batch_of(step)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
