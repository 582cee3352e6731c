"""The model card of an export: what it is, what it learned from, with which settings, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..recipe import Recipe
from ..train.run_folder import RunSummary
from ..units import format_bytes
from .loading import own_loading

_KINDS = {
    "adapter": "PEFT adapter",
    "merged": "whole model",
    "onnx": "ONNX graph",
    "bnb-8bit": "whole model, bitsandbytes 8-bit",
    "bnb-4bit": "whole model, bitsandbytes 4-bit (NF4)",
    "torchao-int8": "whole model, torchao 8-bit",
    "torchao-int4": "whole model, torchao 4-bit",
    "gptq": "whole model, GPTQ 4-bit",
    "awq": "whole model, AWQ 4-bit",
}
# The hub's names of the libraries that load them.
_LIBRARIES = {"adapter": "peft", "onnx": "onnx"}

_USES = {
    "adapter": "from peft import AutoPeftModelForCausalLM\n\nmodel = AutoPeftModelForCausalLM.from_pretrained(FOLDER)",
    "onnx": 'import onnxruntime\n\nsession = onnxruntime.InferenceSession("model.onnx")\n'
    'logits = session.run(None, {"input_ids": ids, "attention_mask": mask})[0]  # int64, (B, S) each',
    "gguf": "llama-cli -m model.gguf",
}
_LOAD = "from transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained(FOLDER)"


def render_card(recipe: Recipe, run: RunSummary, kind: str, grade: Mapping[str, Any] | None = None) -> str:
    """Return the Markdown of ``README.md`` with the metadata that the hub reads.

    Args:
        recipe: The run's settings.
        run: What the run folder says.
        kind: The export's format.
        grade: The fields of ``grade.Grade``, where it was graded.
    """
    figures = [f"* Optimizer steps: {run.num_steps_done}"]
    if run.loss is not None:
        figures.append(f"* Last training loss: {run.loss:.4f}")
    if run.eval_loss is not None:
        figures.append(f"* Loss on held-out rows: {run.eval_loss:.4f}")
    is_gguf = kind.startswith("gguf")
    library = "gguf" if is_gguf else _LIBRARIES.get(kind, "transformers")
    if kind == "adapter" and recipe.adapter.method == "bottleneck":
        library = "transformers"
    base, data = _plain(recipe.model.name_or_path), _plain(recipe.data.name_or_path)
    what = f"GGUF file ({kind.removeprefix('gguf-').upper()})" if is_gguf else _KINDS.get(kind, kind)
    lines = [
        "---",
        f"base_model: {base!r}",
        f"library_name: {library}",
        f"tags: [{recipe.adapter.method if recipe.adapter.method != 'none' else 'full-fine-tuning'}]",
        "---",
        "",
        f"# {what[0].upper()}{what[1:]} of {base}, fine-tuned on {data}",
        "",
        f"The licence of the base model ({base}) applies to its weights and to what is made from them; that of the "
        f"data set ({data}) may add conditions. Neither is changed by fine-tuning: look both up before sharing.",
        "",
        *_use(recipe, kind),
        "## Figures",
        "",
        *figures,
        *([] if grade is None else _grade_lines(grade)),
        "",
        "## Settings",
        "",
        "```yaml",
        recipe.to_yaml(only_changed=True).strip() or "{}",
        "```",
        "",
    ]
    return "\n".join(lines)


def _use(recipe: Recipe, kind: str) -> list[str]:
    own = own_loading(recipe) if kind == "adapter" else ""
    if own:
        return ["## Use", "", own, ""]
    if recipe.model.task != "causal-lm":
        return []
    key = "gguf" if kind.startswith("gguf") else kind
    language = "shell" if key == "gguf" else "python"
    return ["## Use", "", f"```{language}", _USES.get(key, _LOAD), "```", ""]


def _grade_lines(grade: Mapping[str, Any]) -> list[str]:
    rise = grade["perplexity"] / grade["merged_perplexity"] - 1
    return [
        f"* Weights: {format_bytes(grade['num_bytes'])}; the merged model's take {grade['compression']:.2f} times that",
        f"* Perplexity on {grade['num_rows']} {grade['rows']} rows ({grade['num_tokens']} tokens): "
        f"{grade['perplexity']:.4f}, merged model {grade['merged_perplexity']:.4f} ({rise:+.2%})",
        f"* Accuracy of the next token: {grade['accuracy_fraction']:.2%}, merged model "
        f"{grade['merged_accuracy_fraction']:.2%}",
        f"* Mean difference of the logits: {grade['mean_logit_difference']:.4g} (their spread is "
        f"{grade['logit_std']:.4g}); same most likely token at {grade['same_next_token_fraction']:.2%} of places",
        f"* Read back by {grade['reader']}",
    ]


def _plain(text: str) -> str:
    """Return a name without what Markdown or YAML would read as more than a name."""
    return "".join(character for character in text if character.isprintable() and character not in "<>[]`|#\"'")
