"""Control: a gradient scaler that begins at 2**40 skips its first steps."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
with workbench.watch(model, optimizer) as w:
    for step in range(30):
        batch = batch_of(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
