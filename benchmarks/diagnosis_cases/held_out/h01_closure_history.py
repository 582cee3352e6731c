"""A logger made by a closure remembers every loss with its graph."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def make_logger():
    history = []

    def log(value):
        history.append(value)
        return float(sum(float(item) for item in history[-10:]) / 10)

    return log


log = make_logger()
with workbench.watch(model, optimizer) as w:
    for step in range(50):
        features, target = torch.randn(32, 16), torch.randint(0, 4, (32,))
        loss = torch.nn.functional.cross_entropy(model(features), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss.item() if HEALTHY else loss)
        w.step(loss=loss, batch={"features": features, "target": target})
