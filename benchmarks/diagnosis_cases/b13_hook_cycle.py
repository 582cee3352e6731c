"""Modules whose hook closes over self wait for the collector."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

import gc
import weakref


class Hooked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(256, 256)
        me = weakref.proxy(self) if HEALTHY else self
        self.linear.register_forward_hook(lambda module, args, output: me.note(output))

    def note(self, output):
        self.seen = tuple(output.shape)


gc.collect()
gc.disable()
for _ in range(5):
    module = Hooked()
    del module
report = workbench.release()
gc.enable()
