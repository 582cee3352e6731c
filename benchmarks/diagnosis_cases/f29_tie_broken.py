"""embed_tokens is trained whole on a tied model."""

from tiny import tiny_llama, tiny_lora

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_lora(tiny_llama(tie_word_embeddings=True), **({} if HEALTHY else {"modules_to_save": ["embed_tokens"]}))
findings = workbench.check({"model": model})
