"""Built-in presets: named sets of changes to the default Recipe, each for one situation a person is in."""

from __future__ import annotations

from ..errors import Problem, RecipeError
from .recipe import Recipe

PRESETS: dict[str, tuple[str, dict[str, object]]] = {
    "lora": ("LoRA, a good first run", {}),
    "quick": (
        "A few minutes on a CPU: see that everything works",
        {
            "data.max_length": 256,
            "training.max_steps": 40,
            "training.per_device_train_batch_size": 2,
            "training.gradient_accumulation_steps": 1,
            "evaluation.eval_steps": 20,
        },
    ),
    "qlora": (
        "QLoRA: 4-bit base with checkpointing, for small GPUs",
        {
            "quantization.load_in_4bit": True,
            "quantization.bnb_4bit_use_double_quant": True,
            "training.gradient_checkpointing": True,
            "training.optim": "paged_adamw_8bit",
        },
    ),
    "low-memory": (
        "LoRA with every saving that keeps 16-bit weights",
        {
            "training.per_device_train_batch_size": 1,
            "training.gradient_accumulation_steps": 8,
            "training.gradient_checkpointing": True,
            "training.loss_type": "chunked_nll",
            "training.optim": "adamw_bnb_8bit",
        },
    ),
    "full": (
        "Full fine-tuning: every weight trains",
        {"adapter.method": "none", "training.learning_rate": 2e-5},
    ),
}


def preset(name: str) -> Recipe:
    """Return the Recipe of a preset.

    Raises:
        RecipeError: No preset has this name; the message lists them.
    """
    if name not in PRESETS:
        raise RecipeError([Problem("preset", f"{name!r} is no preset. Presets: {', '.join(PRESETS)}.")])
    return Recipe().with_changes(PRESETS[name][1])
