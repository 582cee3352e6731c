"""Forwards with gradients on, their states kept."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
states = []
with workbench.watch(model) as w:
    for step in range(40):
        batch = batch_of(step)
        if HEALTHY:
            with torch.no_grad():
                out = model(**batch)
            states = [out.logits]
        else:
            out = model(**batch)
            states.append(out.logits[:, -1])
        w.step(batch=batch)
