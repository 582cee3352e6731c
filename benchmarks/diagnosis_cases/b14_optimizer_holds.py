"""del model, but the optimizer holds its parameters and moments."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(2):
    loss = model(**batch_of(step)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
del model, loss
if HEALTHY:
    del optimizer
report = workbench.release()
