"""A forward hook stores activations that only a backward pass would clear."""

import torch
from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
model.train(not HEALTHY)


def remember(module, inputs, output):
    if module.training:
        module._acts.append(output.detach())


for layer in model.model.layers:
    layer.mlp._acts = []
    layer.mlp.register_forward_hook(remember)

with torch.no_grad(), workbench.watch(model) as w:
    for step in range(40):
        batch = batch_of(step)
        loss = model(**batch).loss
        w.step(loss=loss, batch=batch)
