"""What to run: the Recipe, its rules across fields, and its presets."""

from .locations import credentials_in
from .presets import PRESETS, preset
from .recipe import FieldInfo, Recipe, field_info, iter_fields
from .rules import TargetFacts, find_problems, require_valid

__all__ = [
    "PRESETS",
    "FieldInfo",
    "Recipe",
    "TargetFacts",
    "credentials_in",
    "field_info",
    "find_problems",
    "iter_fields",
    "preset",
    "require_valid",
]
