"""An exponential moving average of the loss is never detached."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama(layers=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = {"ema": None}
with workbench.watch(model, optimizer) as w:
    for step in range(48):
        batch = batch_of(step, rows=2)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.detach() if HEALTHY else loss
        state["ema"] = value if state["ema"] is None else 0.9 * state["ema"] + 0.1 * value
        w.step(loss=loss, batch=batch)
