"""Every batch is padded to 128 while rows are about 10 tokens."""

import torch
from tiny import padded, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(10):
        rows = [torch.randint(3, 250, (8 + (step + i) % 5,)) for i in range(4)]
        batch = padded(rows)
        if not HEALTHY:
            width = 128 - batch["input_ids"].shape[1]
            pad = torch.nn.functional.pad
            batch = {
                "input_ids": pad(batch["input_ids"], (0, width)),
                "attention_mask": pad(batch["attention_mask"], (0, width)),
                "labels": pad(batch["labels"], (0, width), value=-100),
            }
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
