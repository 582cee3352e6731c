"""Fixtures for the tests of models and data: a cache folder of their own, no hub, one tokenizer for all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.components import hub, tiny_llama
from workbench.recipe import Recipe


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """Return the tokenizer of tiny-llama, trained once."""
    return tiny_llama.build_tokenizer()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point the user cache at an empty folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("WORKBENCH_CACHE", str(folder))
    monkeypatch.delenv("WORKBENCH_WHEEL_DIR", raising=False)
    return folder


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the hub give no answer; returns the names it was asked for."""
    asked: list[str] = []

    def ask(name: str, *_: object) -> Exception:
        asked.append(name)
        return ConnectionError("Name or service not known")

    monkeypatch.setattr(hub, "_ask", ask)
    monkeypatch.setattr(hub, "is_offline", lambda: False)
    monkeypatch.setattr(hub, "cached_snapshot", lambda *_, **__: None)
    return asked


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes rows (or raw lines) as a JSONL file."""

    def write(*rows: Any, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def recipe_for() -> Callable[..., Recipe]:
    """Return a function that makes a Recipe for a data file, with further dotted fields changed."""

    def make(path: Path | str, **changes: Any) -> Recipe:
        fields = {name.replace("__", "."): value for name, value in changes.items()}
        return Recipe().with_changes({"data.name_or_path": str(path), **fields})

    return make
