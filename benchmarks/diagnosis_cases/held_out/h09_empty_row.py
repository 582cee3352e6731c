"""A hand-written attention masks every key of an empty row."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

torch.manual_seed(0)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(60, 32, padding_idx=0)
        self.qkv = torch.nn.Linear(32, 96)
        self.head = torch.nn.Linear(32, 2)

    def forward(self, ids):
        query, key, value = self.qkv(self.embed(ids)).chunk(3, -1)
        scores = query @ key.transpose(1, 2) / 32**0.5
        scores = scores.masked_fill((ids == 0).unsqueeze(1), float("-inf"))
        return self.head((scores.softmax(-1) @ value).mean(1))


model = Attention()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(16):
        ids, target = torch.randint(1, 60, (6, 10)), torch.randint(0, 2, (6,))
        ids[:, 7:] = 0
        if step == 8 and not HEALTHY:
            ids[4] = 0
        loss = torch.nn.functional.cross_entropy(model(ids), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch={"ids": ids, "target": target})
