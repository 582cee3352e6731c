"""The model card of an export: what it is, what it learned from, with which settings, and what was measured."""

from __future__ import annotations

from ..recipe import Recipe
from ..train.run_folder import RunSummary

_KINDS = {"adapter": "PEFT adapter", "merged": "whole model"}


def render_card(recipe: Recipe, run: RunSummary, kind: str) -> str:
    """Return the Markdown of ``README.md`` with the metadata that the hub reads.

    Args:
        recipe: The run's settings.
        run: What the run folder says.
        kind: The export's format.
    """
    figures = [f"* Optimizer steps: {run.num_steps_done}"]
    if run.loss is not None:
        figures.append(f"* Last training loss: {run.loss:.4f}")
    if run.eval_loss is not None:
        figures.append(f"* Loss on held-out rows: {run.eval_loss:.4f}")
    library = "peft" if kind == "adapter" else "transformers"
    base, data = _plain(recipe.model.name_or_path), _plain(recipe.data.name_or_path)
    lines = [
        "---",
        f"base_model: {base!r}",
        f"library_name: {library}",
        f"tags: [{recipe.adapter.method if recipe.adapter.method != 'none' else 'full-fine-tuning'}]",
        "---",
        "",
        f"# {_KINDS.get(kind, kind)} of {base}, fine-tuned on {data}",
        "",
        f"The licence of the base model ({base}) applies to its weights and to what is made from them; that of the "
        f"data set ({data}) may add conditions. Neither is changed by fine-tuning: look both up before sharing.",
        "",
        "## Figures",
        "",
        *figures,
        "",
        "## Settings",
        "",
        "```yaml",
        recipe.to_yaml(only_changed=True).strip() or "{}",
        "```",
        "",
    ]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Return a name without what Markdown or YAML would read as more than a name."""
    return "".join(character for character in text if character.isprintable() and character not in "<>[]`|#\"'")
