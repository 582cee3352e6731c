"""Control: lengths vary, allocated at rest is flat."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer, look="now") as w:
    for step in range(40):
        batch = batch_of(step, rows=1 + step % 5, length=8 + 7 * (step * step % 11))
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
