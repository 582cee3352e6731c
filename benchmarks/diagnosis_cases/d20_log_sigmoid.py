"""-log(sigmoid(x)) underflows; logsigmoid does not."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = torch.nn.Linear(4, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
with workbench.watch(model, optimizer) as w:
    for step in range(5):
        x = torch.ones(4, 4)
        if step == 3:
            x[2] = -500 * torch.sign(model.weight.detach()[0])
        margin = model(x)
        if HEALTHY:
            loss = -torch.nn.functional.logsigmoid(margin).mean()
        else:
            loss = -torch.log(torch.sigmoid(margin)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=x)
