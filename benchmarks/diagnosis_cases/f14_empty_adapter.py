"""The adapter is saved with a state dict that matches nothing."""

import tempfile

from tiny import tiny_lora

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_lora()
folder = tempfile.mkdtemp()
model.save_pretrained(folder, **({} if HEALTHY else {"state_dict": {}}))
findings = workbench.check({"model": model, "saved_folder": folder})
