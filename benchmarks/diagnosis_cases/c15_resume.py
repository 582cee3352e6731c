"""The optimizer state is loaded next to a live copy."""

import os
import tempfile

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama(layers=3, hidden=256)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss = model(**batch_of(0)).loss
loss.backward()
optimizer.step()
optimizer.zero_grad()
del loss
path = os.path.join(tempfile.mkdtemp(), "optimizer.pt")


def to_device(value):
    """Stand for .to("cuda"): a second copy on the device."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: to_device(item) for key, item in value.items()}
    return [to_device(item) for item in value] if isinstance(value, list) else value


torch.save(optimizer.state_dict(), path)
with workbench.watch(model, optimizer, limit="200 MiB" if HEALTHY else "40 MiB") as w:
    optimizer.load_state_dict(to_device(torch.load(path, weights_only=True)))
    batch = batch_of(1)
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    w.step(loss=loss, batch=batch)
