"""A loop stores what each validation step returns."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()


def validation_step(batch):
    with torch.no_grad():
        out = model(**batch)
    return {"loss": out.loss.item()} if HEALTHY else {"loss": out.loss, "logits": out.logits}


outputs = []
with workbench.watch(model) as w:
    for step in range(40):
        batch = batch_of(step)
        outputs.append(validation_step(batch))
        w.step(batch=batch)
