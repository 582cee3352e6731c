"""Keys and values are passed on to the next training step."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

past = None
with workbench.watch(model, optimizer) as w:
    for step in range(40):
        batch = batch_of(step)
        out = model(**batch, past_key_values=past, use_cache=not HEALTHY)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        past = out.past_key_values
        if past is not None:
            for layer in past.layers:
                layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        w.step(loss=out.loss, batch=batch)
