"""The techniques that ``benchmarks.techniques`` switches on one by one, and what a person should know of each."""

from .rows import TECHNIQUES, Technique

__all__ = ["TECHNIQUES", "Technique"]
