"""The forward is small, the gradient overflows float16."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)


class Amplify(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1e5 * 1e5 if not HEALTHY else grad


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)

    def forward(self, x):
        return self.second(Amplify.apply(self.first(x)))


model = Net().half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(4):
        x = torch.randn(4, 16).half()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=x)
