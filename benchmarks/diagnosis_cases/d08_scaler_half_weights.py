"""Trainable float16 weights under a gradient scaler."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
if not HEALTHY:
    model = model.half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
with workbench.watch(model, optimizer) as w:
    for step in range(4):
        batch = batch_of(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
