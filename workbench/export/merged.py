"""One whole model: the adapter's update added to the base weights in the dtype they are stored in."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from ..components.pruning import apply_masks, read_masks
from ..components.quiet import no_progress_bars
from ..components.source import find_source, load_tokenizer
from ..components.task import auto_class
from ..errors import ExportError
from ..events import Cancel, ProgressCallback
from ..recipe import Recipe
from .loading import holds_adapter, load_result
from .stages import begin_stage

# Tokens on which the export is compared with what it was made from.
PROBE_TOKENS = 24


def write_merged(
    recipe: Recipe,
    result: Path,
    target: Path,
    *,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> dict[str, Any]:
    """Write a whole model and its tokenizer, read it back, and compare its logits with the run's own model.

    A base that was quantized for the run is merged in its unquantized form: adding an update to 4-bit weights would
    round most of it away.

    Args:
        recipe: The run's settings.
        result: ``adapter/`` or ``model/`` of the run.
        target: An existing, empty folder.
        progress: Told about the stage ``"export"``.
        cancel: Looked at between the stages.

    Returns:
        ``max_logit_difference`` and ``mean_logit_difference`` between the run's model and the one read back, and
        ``same_next_token_fraction`` of the probe's positions. Of a pruned base also
        ``mean_logit_difference_by_mask``: what it took that the update is left out where weights are pruned.

    Raises:
        ExportError: The adapter cannot be merged, or what was read back is not what was written.
    """
    require_mergeable(recipe)
    source = find_source(recipe, for_training=True, progress=progress, cancel=cancel)
    tokenizer = load_tokenizer(source)
    kind: Any = auto_class(recipe)
    with no_progress_bars(), warnings.catch_warnings(), torch.no_grad():
        # PEFT 0.21 asks transformers 5.24 a question by its old name.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        model, lost = load_result(recipe, source, result), None
        before = _probe(model)
        if holds_adapter(result):
            begin_stage(progress, cancel, 1, "Adding the adapter to the weights")
            model = model.merge_and_unload()
            masks = read_masks(result)
            if masks is not None:
                # What the adapter added to pruned places goes: a pruned model shall stay one.
                apply_masks(model.requires_grad_(False), masks)
                masked = _probe(model)
                lost, before = float((masked - before).abs().mean()), masked
        model.save_pretrained(target, safe_serialization=True)
        tokenizer.save_pretrained(target)
        del model
        begin_stage(progress, cancel, 2, "Reading it back")
        after = _probe(kind.from_pretrained(target, use_safetensors=True))
    difference = (after - before).abs()
    checks = {
        "max_logit_difference": float(difference.max()),
        "mean_logit_difference": float(difference.mean()),
        "logit_std": float(before.std()),
        "same_next_token_fraction": float((after.argmax(-1) == before.argmax(-1)).float().mean()),
    }
    if lost is not None:
        checks["mean_logit_difference_by_mask"] = lost
    # Rounding to 16 bits moves logits by some hundredths of their spread; a lost adapter by a large part of it.
    if not checks["mean_logit_difference"] <= 0.1 * checks["logit_std"]:
        raise ExportError(
            f"The merged model that was read back answers otherwise than the run's (logits differ by "
            f"{checks['mean_logit_difference']:.3g} on average, their spread is {checks['logit_std']:.3g}). "
            "Nothing was kept; export the adapter instead."
        )
    return checks


def require_mergeable(recipe: Recipe) -> None:
    """Raise ExportError where no weights exist that do what the adapter does."""
    if recipe.tasks.data:
        raise ExportError(
            "A run of several tasks has no one merged model. Export the adapter: it holds a plain PEFT adapter for "
            "each task, which PEFT merges by itself (merge_and_unload)."
        )
    if recipe.adapter.method == "bottleneck":
        raise ExportError(
            "Bottleneck adapters cannot be merged: they compute something nonlinear between the layers, which no "
            "change of the base's weights repeats. Export the adapter; workbench.export.load_trained loads it."
        )


def _probe(model: Any) -> torch.Tensor:
    """Return float32 logits on a fixed row of tokens."""
    model.eval()
    vocabulary = model.config.get_text_config().vocab_size
    tokens = (torch.arange(PROBE_TOKENS) * 7919 + 3) % vocabulary
    logits: torch.Tensor = model(input_ids=tokens[None]).logits
    return logits.float()
