"""Micro-batches of very different length are averaged as if they were equal."""

import torch
from tiny import padded, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

torch.manual_seed(0)
model = tiny_llama(layers=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(16):
        sizes = [(40, 44), (4, 5), (36, 30), (5, 4)]
        micros = [padded([torch.randint(3, 256, (size,)) for size in pair]) for pair in sizes]
        total = sum(int((micro["labels"][:, 1:] != -100).sum()) for micro in micros)
        for micro in micros:
            output = model(**micro)
            if HEALTHY:
                share = int((micro["labels"][:, 1:] != -100).sum()) / total
                loss = output.loss * share
            else:
                loss = output.loss / len(micros)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=micro)
