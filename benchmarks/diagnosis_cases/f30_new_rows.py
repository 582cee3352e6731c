"""Four tokens are added; their rows are neither trained nor saved."""

from tiny import tiny_llama, tiny_lora

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
model.resize_token_embeddings(260)
extra = {"trainable_token_indices": [256, 257, 258, 259]} if HEALTHY else {}
model = tiny_lora(model, **extra)
findings = workbench.check({"model": model})
