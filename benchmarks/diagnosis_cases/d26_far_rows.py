"""New rows of the embedding lie far from the old ones."""

import torch
from tiny import tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
model.resize_token_embeddings(260, mean_resizing=True)
if not HEALTHY:
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[256:] = 30 * weight[:256].norm(dim=1).mean() * torch.nn.functional.normalize(torch.randn(4, 64), dim=1)
findings = workbench.check({"model": model})
