"""``workbench calibrate``: measure this machine's device, so that step times are predicted from what it reaches."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from .arguments import ProgressLine


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    parser = verbs.add_parser("calibrate", help="measure this machine's speed for time estimates", description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="what to measure")
    parser.add_argument("--threads", type=int, default=None, help="threads torch computes with on a CPU")
    parser.add_argument("--json", action="store_true", help="print everything that was measured")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, store, and print the main rates."""
    import torch

    from ..hardware import calibrate_device

    if options.threads:
        torch.set_num_threads(options.threads)
    device = calibrate_device(ProgressLine(options), kind=options.device)
    if options.json:
        print(json.dumps(dataclasses.asdict(device)))
        return 0
    print(f"{device.name}: {device.bandwidth_bytes_per_s / 1e9:.1f} GB/s, {device.launch_s * 1e6:.1f} µs an operator")
    for dtype in ("float32", "bfloat16"):
        print(f"  {dtype} products {device.flops_per_s[dtype] / 1e9:,.1f} GFLOP/s")
    if device.flops_per_s["bfloat16"] < 0.5 * device.flops_per_s["float32"]:
        print("  bfloat16 is emulated here: set training.mixed_precision=no and model.dtype=float32.")
    return 0
