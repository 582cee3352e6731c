"""Log-probabilities of float16 logits overflow."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = torch.nn.Linear(8, 16).to(torch.bfloat16)
with torch.no_grad():
    model.weight.fill_(0)
    model.bias.copy_(torch.linspace(-60000, 60000, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with workbench.watch(model, optimizer) as w:
    for step in range(3):
        x = torch.randn(4, 8).to(torch.bfloat16)
        logits = model(x)
        logits = logits.float() if HEALTHY else logits.half()
        log_probs = torch.log_softmax(logits, -1)
        weights = torch.softmax(logits, -1)
        loss = -(weights * log_probs).sum(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=x)
