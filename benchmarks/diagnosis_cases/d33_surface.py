"""A DPO loss goes NaN; the overflow is deep in the float16 model."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
with torch.no_grad():
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(model.model.layers[0].mlp, name).weight.mul_(300)
model = model.to(torch.bfloat16 if HEALTHY else torch.float16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)


def log_probs(batch):
    logits = model(input_ids=batch["input_ids"]).logits.float()
    picked = torch.log_softmax(logits[:, :-1], -1).gather(-1, batch["input_ids"][:, 1:, None])
    return picked.sum((1, 2))


with workbench.watch(model, optimizer) as w:
    for step in range(3):
        batch = batch_of(step)
        values = log_probs(batch)
        loss = -torch.nn.functional.logsigmoid(0.1 * (values[:2] - values[2:])).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
