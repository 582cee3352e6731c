"""Reentrant checkpointing with frozen inputs: the loss has no graph."""

import torch
from tiny import batch_of, tiny_lora

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_lora()
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
if HEALTHY:
    model.enable_input_require_grads()
else:
    model.disable_input_require_grads()
model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

with workbench.watch(model, optimizer) as w:
    for step in range(3):
        batch = batch_of(step)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
