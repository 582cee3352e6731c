"""An adapter is loaded without is_trainable."""

import tempfile

from peft import PeftModel
from tiny import tiny_llama, tiny_lora

import workbench

HEALTHY = globals().get("HEALTHY", False)

folder = tempfile.mkdtemp()
tiny_lora().save_pretrained(folder)
model = PeftModel.from_pretrained(tiny_llama(), folder, is_trainable=HEALTHY)
findings = workbench.check({"model": model})
