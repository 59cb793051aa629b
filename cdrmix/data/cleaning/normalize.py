"""Text normalisation: Unicode NFC, one kind of line break, no control characters; HTML to its main text."""

from __future__ import annotations

import functools
import itertools
import re
import sys
import unicodedata

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLParserException

from cdrmix import _text

# Every line break becomes \n (Unicode 5.8, "Newline Guidelines"). \r\n is replaced before.
LINE_BREAKS = "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
SURROGATES = "\ud800-\udfff"  # a lone surrogate is not a character; UTF-8 cannot hold it
ODD = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff{SURROGATES}]")

# unicodedata.normalize takes quadratic time in a run of combining marks that are not in their order: 5 s for 40,000.
LONG_RUN = 64
MARKS_THAT_LOOK_LIKE_LETTERS = "\u0f73\u0f75\u0f81"  # their combining class is 0; they decompose to two marks each

# The search for the main content takes quadratic time in the nesting depth: 2 s at 10,000 levels. Browsers stop at 512.
MAX_NESTING = 1000
NESTING = re.compile(
    r"<(/?)(?!(?:area|base|br|col|dd|dt|embed|hr|img|input|li|link|meta|option|p|param|source|td|th|tr|track|wbr)\b)"
    r"[a-z]",
    re.IGNORECASE,
)

ASCII_ODD = bytes(byte for byte in range(128) if ODD.match(chr(byte)))
ASCII_BREAKS = bytes(ord(character) for character in LINE_BREAKS if character.isascii())
ASCII_TABLE = bytes(ord("\n") if byte in ASCII_BREAKS else byte for byte in range(256))
ASCII_REMOVED = bytes(byte for byte in ASCII_ODD if byte not in ASCII_BREAKS)


def normalize(text: str) -> str:
    r"""The text in NFC with \n as its only line break.

    Control characters except \n and \t, byte order marks and non-characters are removed. A lone surrogate becomes
    U+FFFD, the replacement character. The function never raises, and it is idempotent.
    """
    try:
        if _text.is_surely_normal(text):  # 0.7 GB/s; the code below has 0.15 GB/s
            return text
    except UnicodeEncodeError:
        pass  # a lone surrogate
    text = text.replace("\r\n", "\n")
    if text.isascii():
        return text.encode().translate(ASCII_TABLE, ASCII_REMOVED).decode("ascii")
    if ODD.search(text):
        text = ODD.sub(_replacement, text)
    # After the removals, because a combining mark may now follow the letter that it composes with.
    return unicodedata.normalize("NFC", _with_ordered_marks(text))


def _with_ordered_marks(text: str) -> str:
    """A canonically equivalent text, whose NFC is the same: the marks of each long run are in their order."""
    one, run = _marks()
    # In a run of twice the length at least one of these places has a whole long run behind it. A search of all places
    # would take as long as the normalisation of usual texts.
    if any(run.match(text, LONG_RUN * found.start()) for found in one.finditer(text[::LONG_RUN])):
        return run.sub(_ordered, text)
    return text


def _ordered(run: re.Match[str]) -> str:
    marks = "".join(unicodedata.normalize("NFD", mark) for mark in run[0])
    return "".join(sorted(marks, key=unicodedata.combining))


@functools.cache
def _marks() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Expressions for one combining mark, and for a long run of them."""
    marks = "".join(filter(unicodedata.combining, map(chr, range(sys.maxunicode + 1))))
    marks = f"[{marks}{MARKS_THAT_LOOK_LIKE_LETTERS}]"
    return re.compile(marks), re.compile(f"{marks}{{{LONG_RUN},}}")


def _replacement(match: re.Match[str]) -> str:
    character = match[0]
    if character in LINE_BREAKS:
        return "\n"
    return "\ufffd" if "\ud800" <= character <= "\udfff" else ""


def html_text(html: str) -> str:
    """The visible main text of an HTML page, normalised, without menus, footers, scripts and image descriptions.

    A page without main content gives all its visible text. A page that cannot be parsed gives "".
    """
    html = normalize(html)  # the parser rejects surrogates
    try:
        text = _extract(html, main_content=True).strip() if nesting(html) <= MAX_NESTING else ""
        # Once more, because entities such as &#0; become characters in the parser.
        return normalize(text or _extract(html, main_content=False).strip())
    except HTMLParserException:
        return ""


def nesting(html: str) -> int:
    """The approximate nesting depth of the page, without void elements (br) and elements with optional end tags (li).

    For a page with few tags, their number: the exact count takes a third of the time of the extraction.
    """
    tags = html.count("<")
    if tags <= MAX_NESTING:
        return tags
    steps = (-1 if slash else 1 for slash in NESTING.findall(html))
    return max(itertools.accumulate(steps, initial=0))


def _extract(html: str, *, main_content: bool) -> str:
    return extract_plain_text(html, main_content=main_content, alt_texts=False, list_bullets=True)
