"""Control: rare long batches, the peak ratchets up, nothing leaks."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(60):
        batch = batch_of(step, length=16 if step % 13 else 64 + step)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
