"""Packed documents attend to each other."""

import torch
from tiny import tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
ids = torch.randint(3, 250, (1, 24), generator=torch.Generator().manual_seed(0))
ids[0, 11] = 2
batch = {"input_ids": ids, "position_ids": torch.cat([torch.arange(12), torch.arange(12)])[None]}
if HEALTHY:
    batch["use_cache"] = False
findings = workbench.check({"model": model, "batch": batch, "packing": True})
