"""The catalogue: real configs of public models, numbers only, so that gated models can be estimated without a hub."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class CatalogueRow:
    """One public model.

    Attributes:
        name: Short name, e.g. ``"llama-3.1-8b"``.
        hub_id: Where it is published, e.g. ``"meta-llama/Llama-3.1-8B"``.
        aliases: Other hub ids or short names with the same config.
        num_parameters: Published count, tied weights counted once.
        license: Its licence in the hub's spelling.
        gated: Whether its weights are given only after accepting terms.
        source: Where the config is published.
        note: What a person should know of this row; may be empty.
        config: Fields of ``config.json`` that shape memory and time.
    """

    name: str
    hub_id: str
    aliases: tuple[str, ...]
    num_parameters: int
    license: str
    gated: bool
    source: str
    note: str
    config: Mapping[str, Any]


@functools.cache
def catalogue() -> tuple[CatalogueRow, ...]:
    """Return all rows, in order of their names."""
    text = resources.files(__package__).joinpath("tables/catalogue.json").read_text(encoding="utf-8")
    return tuple(CatalogueRow(**{**row, "aliases": tuple(row["aliases"])}) for row in json.loads(text)["models"])


@functools.cache
def _rows_by_name() -> dict[str, CatalogueRow]:
    rows: dict[str, CatalogueRow] = {}
    for row in catalogue():
        for name in (row.name, row.hub_id, *row.aliases):
            rows[name.lower()] = row
    for row in catalogue():  # "Qwen2.5-7B" without its owner, where no row claims that name
        for name in (row.hub_id, *row.aliases):
            rows.setdefault(name.rpartition("/")[2].lower(), row)
    return rows


def find_row(name: str) -> CatalogueRow | None:
    """Return the row of a short name, a hub id or an alias (case does not matter), or None."""
    return _rows_by_name().get(name.strip().lower())


def near_names(name: str, count: int = 3) -> list[str]:
    """Return the names of the catalogue that look most like ``name``, nearest first, each model once."""
    rows = _rows_by_name()
    lowered = name.strip().lower()
    near = difflib.get_close_matches(lowered, rows, n=4 * count, cutoff=0.6)
    near += [known for known in rows if len(lowered) >= 4 and lowered in known]
    return list(dict.fromkeys(rows[known].name for known in near))[:count]


def config_of(row: CatalogueRow) -> PretrainedConfig:
    """Return a fresh transformers config of ``row``."""
    from transformers import CONFIG_MAPPING

    values = dict(row.config)
    return CONFIG_MAPPING[values.pop("model_type")].from_dict(values)
