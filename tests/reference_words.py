"""The words of near-duplicates in Python: those of \\w+, and each character of a script without spaces."""

from __future__ import annotations

import re

BITS = 2**64 - 1
VOWEL_SIGNS = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Myanmar, Khmer: not all are of \w
OWN = rf"{VOWEL_SIGNS}\u2e80-\u312f\u31f0-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U00031fff"
# Punctuation and spaces of the scripts with vowel signs.
NONE = r"\u0e4f\u0e5a\u0e5b\u104a-\u104f\u17d4-\u17d6\u17d8-\u17da"
WORD = re.compile(rf"(?![{NONE}])(?:[{VOWEL_SIGNS}]|(?=[{OWN}])\w)|(?:(?![{OWN}])\w)+")


def words(text: str) -> list[str]:
    """The words of a text, in order."""
    return WORD.findall(text.lower())


def mixed(x: int) -> int:
    """The bits of a hash, mixed."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & BITS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & BITS
    return x ^ (x >> 31)
