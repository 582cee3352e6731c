"""The formats a run can be exported to. Panel and command line list them from here."""

from __future__ import annotations

FORMATS: dict[str, str] = {
    "adapter": "the adapter alone (safetensors), small; its base model is loaded beside it",
    "merged": "one whole model (safetensors) with the adapter's update added to the base weights",
    "script": "a plain Python script with its tokens that repeats the run without the workbench",
}
