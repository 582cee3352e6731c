"""Many adapters are loaded for evaluation, one is active."""

import torch
from tiny import batch_of, lora_config, tiny_lora

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_lora()
for number in range(6):
    if HEALTHY:
        model.delete_adapter(f"eval{number - 1}" if number else "default")
    model.add_adapter(f"eval{number}", lora_config())
    model.set_adapter(f"eval{number}")
    with torch.no_grad():
        model(**batch_of(number))
report = workbench.release()
