"""reset() rebinds the list; a reader still holds the old one, which keeps growing."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


class ListMetric:
    def __init__(self):
        self.preds = []

    def reset(self):
        if HEALTHY:
            self.preds.clear()
        else:
            self.preds = []


class Reporter:
    def __init__(self, metric):
        self.history = []
        self.metric = metric

    def collect(self):
        if not HEALTHY:
            self.history.append(self.metric.preds)


metric = ListMetric()
reporter = Reporter(metric)
with workbench.watch(model, optimizer) as w:
    for step in range(48):
        batch = batch_of(step)
        out = model(**batch)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        metric.preds.append(out.logits.detach())
        if step % 2 == 1:
            reporter.collect()
            metric.reset()
        w.step(loss=out.loss, batch=batch)
