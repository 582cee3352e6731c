"""Attention scores overflow float16 in eager attention."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama(attn_implementation="eager")
with torch.no_grad():
    model.model.layers[0].self_attn.q_proj.weight.mul_(2500)
    model.model.layers[0].self_attn.k_proj.weight.mul_(2500)
model = model.to(torch.bfloat16 if HEALTHY else torch.float16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)

with workbench.watch(model, optimizer) as w:
    for step in range(4):
        batch = batch_of(step)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
