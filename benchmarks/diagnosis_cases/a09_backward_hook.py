"""Backward hooks keep gradients of activations after backward."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def keep(module, grad_input, grad_output):
    if not HEALTHY:
        module.last_grad = grad_output


handles = [layer.mlp.register_full_backward_hook(keep) for layer in model.model.layers]
for step in range(3):
    loss = model(**batch_of(step)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
findings = workbench.check({"model": model, "optimizer": optimizer})
