"""LoRA at long context: activations dominate."""

import torch
from tiny import batch_of, tiny_lora

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_lora()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
with workbench.watch(model, optimizer, limit="8 MiB") as w:
    for step in range(3):
        batch = batch_of(step, rows=4, length=8 if HEALTHY else 512)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
