"""A metric object is never reset at the end of an evaluation."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


class Accuracy:
    def __init__(self):
        self.preds, self.targets = [], []

    def update(self, preds, targets):
        self.preds.append(preds)
        self.targets.append(targets)

    def compute(self):
        return (torch.cat(self.preds) == torch.cat(self.targets)).float().mean()

    def reset(self):
        self.preds.clear()
        self.targets.clear()


metric = Accuracy()
with workbench.watch(model, optimizer) as w:
    for step in range(60):
        batch = batch_of(step)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 6 == 5:
            with torch.no_grad():
                for row in range(4):
                    held_out = batch_of(1000 + row)
                    metric.update(model(**held_out).logits.argmax(-1), held_out["labels"])
            metric.compute()
            if HEALTHY:
                metric.reset()
        w.step(loss=loss, batch=batch)
