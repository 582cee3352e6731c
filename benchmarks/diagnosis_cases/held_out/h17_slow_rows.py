"""The data set reads and parses its rows slowly, and no worker helps."""

import time

import torch
from tiny import tiny_llama, token_rows

import workbench

HEALTHY = globals().get("HEALTHY", False)


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = token_rows(96, length=16)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if not HEALTHY:
            time.sleep(0.02)
        return {name: torch.tensor(value) for name, value in self.rows[index].items()}


model = tiny_llama(layers=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(Rows(), batch_size=4)
with workbench.watch(model, optimizer) as w:
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
