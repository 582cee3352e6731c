"""A new adapter for each task, none dropped."""

import torch
from tiny import batch_of, lora_config, tiny_lora

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_lora()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(40):
        if step and step % 4 == 0:
            if HEALTHY:
                model.delete_adapter(f"task{step // 4 - 1}" if step > 4 else "default")
            model.add_adapter(f"task{step // 4}", lora_config())
            model.set_adapter(f"task{step // 4}")
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        batch = batch_of(step)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
