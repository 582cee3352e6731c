"""The panel's own words in English and simplified Chinese. The English text is its own key."""

from __future__ import annotations

from typing import Any

from ..errors import WorkbenchError
from .texts_zh import ZH

LANGUAGES: dict[str, dict[str, str]] = {"en": {}, "zh": ZH}


class LanguageError(WorkbenchError, ValueError):
    """A language that the panel has no texts in."""


class Say:
    """Says the panel's texts in one language.

    Example:
        >>> Say("zh")("Pause")
        '暂停'
    """

    def __init__(self, language: str = "en") -> None:
        """Choose a language.

        Raises:
            LanguageError: There are no texts in it.
        """
        if language not in LANGUAGES:
            raise LanguageError(f"language={language!r} has no texts; there are {', '.join(map(repr, LANGUAGES))}.")
        self.language = language
        self._texts = LANGUAGES[language]

    def __call__(self, text: str, **values: Any) -> str:
        """Return the text in this language, with ``{names}`` filled in; a text without translation stays English."""
        found = self._texts.get(text, text)
        return found.format(**values) if values else found
