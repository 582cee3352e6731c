"""A residual stack in float16 grows from block to block beyond 65504."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

torch.manual_seed(0)


class Block(torch.nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.inner, self.outer = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        with torch.no_grad():
            self.outer.weight.mul_(gain)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(1.0), Block(1.0), Block(1.0 if HEALTHY else 60000.0)])
        self.head = torch.nn.Linear(32, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Net().half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(6):
        x, target = torch.randn(8, 32).half(), torch.randint(0, 2, (8,))
        loss = torch.nn.functional.cross_entropy(model(x).float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        w.step(loss=loss, batch={"x": x, "target": target})
