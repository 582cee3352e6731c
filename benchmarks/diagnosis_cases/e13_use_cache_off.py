"""The model is saved with use_cache=False."""

import tempfile

from tiny import tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
model.config.use_cache = HEALTHY
model.generation_config.use_cache = HEALTHY
folder = tempfile.mkdtemp()
model.save_pretrained(folder)
findings = workbench.check({"saved_folder": folder})
