"""A class attribute, shared by all instances, collects hidden states for a probe."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama(layers=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


class Probe:
    def __init__(self, step):
        self.step = step

    def record(self, states):
        Probe.seen[self.step] = states.mean().item() if HEALTHY else states.detach()


Probe.seen = {}
with workbench.watch(model, optimizer) as w:
    for step in range(48):
        batch = batch_of(step, rows=2, length=16)
        out = model(**batch, output_hidden_states=True)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        Probe(step).record(out.hidden_states[-1])
        w.step(loss=out.loss, batch=batch)
