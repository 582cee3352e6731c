"""Loader workers read a data set that is a list of Python strings."""

import numpy as np
import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)


class Texts(torch.utils.data.Dataset):
    def __init__(self):
        self.texts = np.arange(100_000) if HEALTHY else [f"row {index}" for index in range(100_000)]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return {"length": len(str(self.texts[index]))}


loader = torch.utils.data.DataLoader(Texts(), batch_size=8, num_workers=2)
findings = workbench.check({"dataloader": loader})
