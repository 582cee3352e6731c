"""Only Linear weights are frozen: norms and embeddings train too."""

from tiny import tiny_lora

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_lora()
if not HEALTHY:
    for name, parameter in model.named_parameters():
        if "norm" in name or "embed_tokens" in name:
            parameter.requires_grad_(True)
findings = workbench.check({"model": model})
