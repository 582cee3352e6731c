"""The inner exception of a chain holds its own frames."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

import traceback


def inner():
    activations = torch.randn(512, 1024)
    raise RuntimeError(f"out of memory {activations.shape}")


def outer():
    try:
        inner()
    except RuntimeError as error:
        raise ValueError("the batch failed") from error


saved = None
try:
    outer()
except ValueError as error:
    if not HEALTHY:
        saved = error
        traceback.clear_frames(saved.__traceback__)
report = workbench.release()
