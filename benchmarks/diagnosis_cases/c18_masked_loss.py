"""A masked loss copies all logits to float32."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama(vocab=8192).to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer, limit="96 MiB" if HEALTHY else "24 MiB") as w:
    for step in range(3):
        batch = batch_of(step, rows=4, length=64)
        logits = model(input_ids=batch["input_ids"]).logits.float()
        mask = (batch["labels"][:, 1:] != -100).float()
        log_probs = torch.log_softmax(logits[:, :-1], -1)
        picked = log_probs.gather(-1, batch["labels"][:, 1:, None])[..., 0]
        loss = -(picked * mask).sum() / mask.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
