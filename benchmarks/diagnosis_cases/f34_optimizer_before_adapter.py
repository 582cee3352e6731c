"""The optimizer is built before the adapter is added."""

import torch
from tiny import tiny_llama, tiny_lora

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model = tiny_lora(model)
if HEALTHY:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
findings = workbench.check({"model": model, "optimizer": optimizer})
