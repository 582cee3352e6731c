"""An exception that was kept holds the frame of the step."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

import sys


def step():
    activations = torch.randn(512, 1024)
    raise ValueError(f"failed after {tuple(activations.shape)}")


try:
    step()
except ValueError as error:
    if not HEALTHY:
        sys.last_exc = sys.last_value = error
        sys.last_traceback = error.__traceback__
report = workbench.release()
