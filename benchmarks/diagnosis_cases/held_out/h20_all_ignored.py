"""The prompt fills the whole window, so that a batch has no label left."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama(layers=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(logits, labels):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


with workbench.watch(model, optimizer) as w:
    for step in range(16):
        batch = batch_of(step, rows=2)
        labels = batch["labels"]
        prompt = 24 if step == 10 and not HEALTHY else 8
        labels[:, :prompt] = -100
        logits = model(batch["input_ids"]).logits
        loss = loss_of(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        w.step(loss=loss, batch=batch)
