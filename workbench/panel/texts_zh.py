"""Simplified Chinese texts of the panel, by their English ones. A test holds the list complete."""

from __future__ import annotations

ZH: dict[str, str] = {}
