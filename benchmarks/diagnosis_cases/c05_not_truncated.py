"""One row of 400 tokens passes a collator that should cut at 64."""

import torch
from tiny import padded, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

lengths = [20] * 12
lengths[9] = 400
rows = [{"input_ids": list(range(1, 1 + n % 250)) * (1 + n // 250)} for n in lengths]


def collate(samples):
    return padded([torch.tensor(row["input_ids"][: 64 if HEALTHY else None]) for row in samples])


loader = torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=collate)
model = tiny_llama()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer, limit="8 MiB", max_length=64) as w:
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
