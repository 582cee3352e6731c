"""Published measurements as Recipes: one file for each family of scripts that published them."""

from .mapping import map_row
from .row import MappedRow, Reading, UnmappedRow, readings_of

__all__ = ["MappedRow", "Reading", "UnmappedRow", "map_row", "readings_of"]
