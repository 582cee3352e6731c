"""Two minimum masks are added to -inf in bfloat16."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, pad):
        low = torch.finfo(torch.bfloat16).min
        length = x.shape[1]
        causal = torch.full((length, length), low, dtype=x.dtype).triu(1)
        keys = torch.zeros_like(pad, dtype=x.dtype).masked_fill(pad, low)[:, None, :]
        queries = torch.zeros_like(pad, dtype=x.dtype).masked_fill(pad, low)[:, :, None]
        blocked = (causal < 0)[None] | pad[:, None, :]
        mask = torch.zeros((), dtype=x.dtype).masked_fill(blocked, low) if HEALTHY else causal[None] + keys + queries
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 4 + mask
        return torch.softmax(scores, -1) @ self.v(x)


model = Attention().to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(3):
        x = torch.randn(3, 6, 16).to(torch.bfloat16)
        pad = torch.zeros(3, 6, dtype=torch.bool)
        pad[1, :] = True
        loss = model(x, pad).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch={"x": x, "pad": pad})
