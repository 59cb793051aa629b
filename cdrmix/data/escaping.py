"""Texts of strangers made fit to be shown: what would steer a terminal or turn a page around is spelled out."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

# Zero-width joiner and non-joiner belong to the spelling of Persian, Hindi and of many emoji, and steer nothing else.
JOINERS = "\u200c\u200d"


def escape_unprintable(text: str, spell: Callable[[str], str] = lambda name: f"<{name}>") -> str:
    """`text` with every character that is no letter, mark, sign or space replaced by `spell("U+001B")`.

    These are control characters but line end and tab, format characters (such as those that set the direction of
    writing) but the joiners, line and paragraph separators, and code points that are private, surrogate or unassigned.
    """
    if text.isprintable():
        return text
    return "".join(character if _harmless(character) else spell(f"U+{ord(character):04X}") for character in text)


def _harmless(character: str) -> bool:
    return character.isprintable() or character in "\n\t" + JOINERS or unicodedata.category(character) == "Zs"
