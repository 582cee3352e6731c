"""The reference page of the Recipe, made from its fields. ``make docs`` writes it to ``docs/recipe.md``."""

from __future__ import annotations

from .presets import PRESETS
from .recipe import FieldInfo, Recipe, iter_fields


def render_reference() -> str:
    """Return the Markdown page that documents every field and preset."""
    lines = [
        "# The Recipe",
        "",
        "Every setting of a run, made from the code by `make docs`. Change a field in the panel, with",
        "`--set group.name=value` on the command line, or in YAML:",
        "",
        "```yaml",
        "model: {name_or_path: smollm2-135m-instruct}",
        "data: {name_or_path: my-chats.jsonl}",
        "training: {learning_rate: 1e-4}",
        "```",
        "",
        "Fields marked • show their effect on memory and time in the panel and in `workbench plan`.",
    ]
    groups: dict[str, list[FieldInfo]] = {}
    for info in iter_fields():
        groups.setdefault(info.group, []).append(info)
    for group, fields in groups.items():
        doc = (Recipe.model_fields[group].annotation.__doc__ or "").split("\n")[0]
        lines += ["", f"## {group}", "", doc, "", "| field | allowed | default | meaning |", "|---|---|---|---|"]
        for info in fields:
            mark = " •" if info.toggle else ""
            lines.append(f"| `{info.name}`{mark} | {_allowed(info)} | `{_shown(info.default)}` | {_plain(info.doc)} |")
    lines += ["", "## Presets", "", "| name | for | changes |", "|---|---|---|"]
    for name, (purpose, changes) in PRESETS.items():
        text = ", ".join(f"`{path}={_shown(value)}`" for path, value in changes.items()) or "none: the defaults"
        lines.append(f"| `{name}` | {purpose} | {text} |")
    return "\n".join(lines) + "\n"


def _allowed(info: FieldInfo) -> str:
    if info.choices:
        text = ", ".join(f"`{choice}`" for choice in info.choices)
    elif info.minimum is not None or info.maximum is not None:
        low = "" if info.minimum is None else f"from {info.minimum:g}"
        high = "" if info.maximum is None else f" to {info.maximum:g}"
        text = f"{info.type_name} {low}{high}".strip()
    else:
        text = {"str": "text", "bool": "true, false", "list": "list", "dict": "mapping"}.get(
            info.type_name, info.type_name
        )
    return text + (", or nothing" if info.optional else "")


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "nothing" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _plain(doc: str) -> str:
    return doc.replace("``", "`").replace("|", "\\|")
