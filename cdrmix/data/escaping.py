"""Escaping of untrusted text for a terminal or a page: control and formatting characters are shown by name."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

# Zero-width joiner and non-joiner are part of the orthography of Persian and Hindi and of many emoji.
JOINERS = "\u200c\u200d"


def escape_unprintable(text: str, name: Callable[[str], str] = lambda code: f"<{code}>") -> str:
    """`text` with every unprintable character replaced by `name("U+001B")`.

    Unprintable are control characters except line feed and tab, format characters (such as those for the writing
    direction) except the joiners, line and paragraph separators, and private, surrogate or unassigned code points.
    """
    if text.isprintable():
        return text
    return "".join(character if _is_printable(character) else name(f"U+{ord(character):04X}") for character in text)


def _is_printable(character: str) -> bool:
    return character.isprintable() or character in "\n\t" + JOINERS or unicodedata.category(character) == "Zs"
