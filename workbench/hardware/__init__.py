"""The device a run is estimated for or runs on: its table, this machine's, and its calibration."""

from .calibrate import calibrate_device
from .device import Device, device_names, find_device, ram_bytes, read_device, target_device

__all__ = ["Device", "calibrate_device", "device_names", "find_device", "ram_bytes", "read_device", "target_device"]
