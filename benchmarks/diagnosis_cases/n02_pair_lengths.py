"""Control: chosen and rejected answers of varied length."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

import random

model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
draw = random.Random(0)
with workbench.watch(model, optimizer) as w:
    for step in range(60):
        chosen, rejected = batch_of(step, length=draw.randint(8, 60)), batch_of(5000 + step, length=draw.randint(8, 60))
        loss = model(**chosen).loss - 0.1 * model(**rejected).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=chosen)
