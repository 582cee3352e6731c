"""A prepare() helper keeps what it was given, run after run."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)


class Accelerator:
    def __init__(self):
        self._models = []

    def prepare(self, model):
        self._models.append(model)
        return model

    def free_memory(self):
        self._models.clear()


accelerator = Accelerator()
for attempt in range(4):
    model = accelerator.prepare(torch.nn.Linear(256, 256))
    model(torch.zeros(2, 256)).sum().backward()
    if HEALTHY:
        accelerator.free_memory()
del model
report = workbench.release()
