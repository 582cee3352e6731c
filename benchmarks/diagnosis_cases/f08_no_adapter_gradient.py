"""Reentrant checkpointing on frozen inputs: no gradient reaches the layers' adapters."""

import torch
from tiny import tiny_lora

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_lora(target_modules=["q_proj", "v_proj", "lm_head"])
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
if HEALTHY:
    model.enable_input_require_grads()
else:
    model.disable_input_require_grads()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
findings = workbench.check({"model": model, "optimizer": optimizer})
