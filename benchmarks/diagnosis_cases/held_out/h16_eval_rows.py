"""Each validation appends its scores to a list that nobody empties."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama(layers=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
all_scores = []


def validate():
    model.eval()
    if HEALTHY:
        all_scores.clear()
    with torch.no_grad():
        for seed in range(2):
            logits = model(**batch_of(1000 + seed, rows=2)).logits
            all_scores.append(logits.log_softmax(-1))
    model.train()
    return len(all_scores)


with workbench.watch(model, optimizer) as w:
    for step in range(80):
        batch = batch_of(step, rows=2)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            validate()
        w.step(loss=loss, batch=batch)
