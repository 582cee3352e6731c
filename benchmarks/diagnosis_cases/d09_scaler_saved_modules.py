"""Only the modules trained whole are float16."""

import torch
from tiny import batch_of, tiny_lora

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_lora(modules_to_save=["lm_head"])
if not HEALTHY:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "modules_to_save" in name:
            parameter.data = parameter.data.half()
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)

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
