"""Adapters that PEFT has none of: which parameters they are, and how they lie in a folder.

A folder holds ``adapter_model.safetensors`` under the names of the model's own parameters, and
``workbench_adapter.json`` with what attaching them again takes. It is no PEFT folder on purpose: PEFT and transformers
would try to read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import ModelError

WEIGHTS = "adapter_model.safetensors"
CONFIG = "workbench_adapter.json"
_ATTRIBUTE = "workbench_adapter"


@dataclass(frozen=True)
class OwnAdapter:
    """What was attached to a model.

    Attributes:
        kind: ``"bottleneck"`` or ``"tasks"``.
        base_model: Name or folder of the base.
        settings: What attaching it again takes.
        names: Parameters that belong to it, whole modules trained beside it included.
    """

    kind: str
    base_model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()


def own_adapter(model: Any) -> OwnAdapter | None:
    """Return what was attached to ``model``, or None: it has a PEFT adapter, or none."""
    found: OwnAdapter | None = getattr(model, _ATTRIBUTE, None)
    return found


def mark_adapter(model: Any, adapter: OwnAdapter) -> None:
    """Note on the model what was attached."""
    setattr(model, _ATTRIBUTE, adapter)


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapter's parameters by name, detached."""
    adapter = own_adapter(model)
    wanted = set(adapter.names if adapter is not None else ())
    return {name: one.detach() for name, one in model.named_parameters(remove_duplicate=False) if name in wanted}


def save_own_adapter(model: nn.Module, folder: Path) -> None:
    """Write the adapter's files into an existing folder."""
    from safetensors.torch import save_file

    adapter = own_adapter(model)
    if adapter is None:
        raise ValueError("The model has no adapter of this kind.")
    tensors = {name: one.cpu().contiguous() for name, one in adapter_tensors(model).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    plain = asdict(adapter)
    plain.pop("names")
    (folder / CONFIG).write_text(json.dumps(plain, indent=1), encoding="utf-8")


def read_own_adapter(folder: Path) -> tuple[OwnAdapter, dict[str, Tensor]]:
    """Return what a folder holds.

    Raises:
        ModelError: It cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        plain = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
        adapter = OwnAdapter(**plain, names=tuple(tensors))
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ModelError(f"{folder} holds no adapter of the workbench that can be read ({error}).") from error
    return adapter, tensors
