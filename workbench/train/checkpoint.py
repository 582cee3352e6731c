"""Weights and random state in and out of folders: safetensors, read back, nothing that runs code when it is read."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..components.multitask import save_tasks
from ..components.own_adapter import adapter_tensors, own_adapter, read_own_adapter, save_own_adapter
from ..components.quiet import no_progress_bars
from ..errors import ModelError, RunError

ADAPTER_WEIGHTS = "adapter_model.safetensors"
MODEL_WEIGHTS = "model.safetensors"
MODEL_INDEX = "model.safetensors.index.json"


def is_adapter(model: nn.Module) -> bool:
    """Whether the model has an adapter, PEFT's or the workbench's own, which is what gets saved."""
    return hasattr(model, "peft_config") or own_adapter(model) is not None


def save_weights(model: Any, folder: Path, *, for_resume: bool = False) -> None:
    """Write what was trained: the adapter alone, or the whole model, as safetensors with its config.

    Args:
        model: The model.
        folder: Where to.
        for_resume: Name the tensors as the model does, for ``load_weights``. Otherwise they get the names of the
            published checkpoints, which transformers gives back where its own code joins or renames weights (models of
            images, mixtures of experts): other programs read those.

    Raises:
        RunError: Reading the files back gives something else than was written.
    """
    with no_progress_bars():
        _write_weights(model, folder, for_resume)


def _write_weights(model: Any, folder: Path, for_resume: bool) -> None:
    own = own_adapter(model)
    if own is not None:
        save_own_adapter(model, folder)
        if own.kind == "tasks" and not for_resume:
            save_tasks(model, folder)
        _check_written(folder, adapter_tensors(model))
    elif is_adapter(model):
        # "auto" would ask the hub whether the vocabulary was resized; it never is here.
        model.save_pretrained(folder, save_embedding_layers=False)
        _check_adapter(model, folder)
    else:
        model.save_pretrained(folder, save_original_format=not for_resume)
        _check_names(model, folder, same_names=for_resume)


def load_weights(model: Any, folder: Path) -> None:
    """Read weights that ``save_weights`` wrote into the same parameters, so that an optimizer keeps its hold on them.

    Raises:
        RunError: The folder holds other weights than this model has.
    """
    if own_adapter(model) is not None:
        _load_own(model, folder)
        return
    if is_adapter(model):
        _load_adapter(model, folder)
        return
    expected = set(model.state_dict()) - _tied_names(model)
    found: set[str] = set()
    for tensors in _read_model_files(folder):
        found |= tensors.keys()
        model.load_state_dict(tensors, strict=False)
    if found & expected != expected:
        raise RunError(_other_weights(folder, sorted(expected - found)))


def random_state() -> dict[str, Any]:
    """Return the state of every random generator, in the form transformers' trainer restores."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.random.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put every random generator where ``random_state`` found it."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.random.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.random.set_rng_state(state["cuda"])


def _load_adapter(model: Any, folder: Path) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"The adapter in {folder} cannot be read ({error}). Continue from another checkpoint."
        ) from error
    expected = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    if tensors.keys() != expected:
        raise RunError(_other_weights(folder, sorted(expected ^ tensors.keys())))
    set_peft_model_state_dict(model, tensors)


def _load_own(model: Any, folder: Path) -> None:
    try:
        _, tensors = read_own_adapter(folder)
    except ModelError as error:
        raise RunError(f"{error} Continue from another checkpoint.") from error
    expected = {name: one.shape for name, one in adapter_tensors(model).items()}
    if {name: one.shape for name, one in tensors.items()} != expected:
        raise RunError(_other_weights(folder, sorted(expected.keys() ^ tensors.keys()) or sorted(expected)))
    model.load_state_dict(tensors, strict=False)


def _read_model_files(folder: Path) -> Iterable[Mapping[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    names = [MODEL_WEIGHTS]
    if (folder / MODEL_INDEX).is_file():
        names = sorted(set(json.loads((folder / MODEL_INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    for name in names:
        try:
            yield load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{folder / name} cannot be read ({error}). Continue from another checkpoint.") from error


def _tied_names(model: Any) -> set[str]:
    """Return parameters that share storage with another one; only one of each is written."""
    return set(getattr(model, "all_tied_weights_keys", None) or ())


def _check_adapter(model: Any, folder: Path) -> None:
    """Read the adapter back and compare every tensor; adapters are small."""
    from peft import get_peft_model_state_dict

    _check_written(folder, get_peft_model_state_dict(model, save_embedding_layers=False))


def _check_written(folder: Path, expected: Mapping[str, Tensor]) -> None:
    from safetensors.torch import load_file

    written = load_file(folder / ADAPTER_WEIGHTS)
    wrong = [
        name
        for name, tensor in expected.items()
        if name not in written or not torch.equal(written[name].view(torch.uint8), _bytes_of(tensor))
    ]
    if wrong or written.keys() != expected.keys():
        raise RunError(_read_back_failed(folder, wrong or sorted(written.keys() ^ expected.keys())))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8)


def _check_names(model: Any, folder: Path, *, same_names: bool) -> None:
    """Compare names and shapes with the files' headers, without reading whole models back.

    Under the names of the published checkpoint weights may be cut or joined, so that only their sum tells.
    """
    from safetensors import safe_open

    found: dict[str, list[int]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  # not a dict
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for tied in _tied_names(model):
        expected.pop(tied, None)
    wrong = [name for name, shape in expected.items() if found.get(name) != shape]
    counts = [sum(math.prod(shape) for shape in shapes.values()) for shapes in (found, expected)]
    if not same_names and found.keys() != expected.keys() and counts[0] == counts[1]:
        return
    if wrong:
        raise RunError(_read_back_failed(folder, wrong))


def _other_weights(folder: Path, names: list[str]) -> str:
    return (
        f"{folder} holds the weights of another model or adapter ({len(names)} names differ, such as {names[0]}). "
        "Continue with the recipe.yaml that the run was started with."
    )


def _read_back_failed(folder: Path, names: list[str]) -> str:
    return f"{folder}: {len(names)} tensors read back differently, such as {names[0]}. Check the disk and save again."
