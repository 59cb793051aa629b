"""Normal text against the Unicode data of this Python; HTML to text, of pages that are none too."""

from __future__ import annotations

import random
import re
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cdrmix import _text
from cdrmix.data.cleaning.normalize import MAX_NESTING, html_text, nesting, normalize

texts = st.text() | st.text("ab\r\n\t\v\f\x00\x1b\x7f\x85\x9f\u0301\u2028\ufeffe\ud800 ")


def defined(text: str) -> str:
    """The same by the definition, a character at a time."""
    out = []
    for character in re.sub("\r\n", "\n", text):
        category = unicodedata.category(character)
        if category in ("Zl", "Zp") or character in "\r\v\f\x1c\x1d\x1e\x85":
            out.append("\n")
        elif category == "Cs":
            out.append("\ufffd")
        elif character in "\n\t" or (category != "Cc" and character not in "\ufeff\ufffe\uffff"):
            out.append(character)
    return unicodedata.normalize("NFC", "".join(out))


@given(texts)
@example("a\r\r\n\nb")
@example("e\x00\u0301")
def test_normal_text_is_as_defined(text: str) -> None:
    normal = normalize(text)
    assert normal == defined(text)
    assert normalize(normal) == normal
    normal.encode()


def test_every_character() -> None:
    for begin in range(0, 0x110000, 0x1000):
        text = "x".join(map(chr, range(begin, begin + 0x1000)))
        assert normalize(text) == defined(text), hex(begin)


def test_what_is_surely_normal_is_normal_in_any_order() -> None:
    """The short cut for most texts: none of its characters is changed, nor composes with another of them."""
    plain = [c for c in map(chr, range(0x110000)) if not "\ud800" <= c <= "\udfff" and _text.is_surely_normal(c)]
    assert len(plain) > 30_000
    assert {"a", "\n", "é", "中", "한", "\u2013"} <= set(plain)
    rng = random.Random(1)
    for _ in range(5):
        rng.shuffle(plain)
        text = "".join(plain)
        assert _text.is_surely_normal(text)
        assert defined(text) == text
    for odd in ("\x00", "\r", "\x7f", "\x85", "\u0301", "\u2028", "\ufeff", "\u1161", "\u212b"):
        assert not _text.is_surely_normal(f"plain{odd}text")


PAGE = """<!doctype html><html><head><title>T</title><style>p {{}}</style></head><body>
<nav><a href="/">Home</a> <a href="/about">About</a></nav>
<main><h1>Heading</h1><p>First &amp; foremost, <b>bold</b> words.</p><p>Second{}</p><img src="x" alt="a picture"></main>
<script>var hidden = 1;</script><footer>Imprint</footer></body></html>"""


def test_main_text_of_a_page() -> None:
    text = html_text(PAGE.format(""))
    assert text.splitlines() == ["Heading", "", "First & foremost, bold words.", "", "Second"]


def test_what_entities_stand_for_is_normalised() -> None:
    assert html_text("<p>e&#x301; a&#xFEFF;b</p>") == "é ab"


def test_a_page_without_a_main_part_gives_all_it_has() -> None:
    assert html_text("<nav>Only a menu</nav>") == "Only a menu"
    assert html_text("plain text") == "plain text"


@pytest.mark.parametrize(
    "html", ["", "   ", "<", "<!--", "<div<div<div", "</p></p>", "\x00", "<script>x", "\ud800", "&#xD800;"]
)
def test_garbage_gives_text(html: str) -> None:
    assert "<div" not in html_text(html)


@given(
    st.lists(
        st.sampled_from(["<p>", "</p>", "<table><tr>", "<a href='", "text", "&", "<!--", "\x00", "é", ">", "<svg>"])
    )
)
def test_random_markup_gives_normal_text(pieces: list[str]) -> None:
    text = html_text("".join(pieces))
    assert normalize(text) == text


def test_deep_nesting() -> None:
    """The main part is not searched for in pages nested deeper than any real one; their text is kept all the same."""
    depth = 50 * MAX_NESTING  # the search would take a minute
    page = "<div>" * depth + "<p>deep</p><br>" + "</div>" * depth
    assert nesting(page) == depth
    assert html_text(page) == "deep"
    assert nesting("<div><br></div>" * depth) == 1


MARKS = "\u0301\u0316\u0344\u0345\u05b4\u0f71\u0f73\u0f75\u0f81\u3099"


@given(st.lists(st.tuples(st.text("ae\u00e9\u0fb2\uac00", max_size=2), st.text(MARKS, min_size=1)), max_size=4))
def test_a_long_run_of_marks_has_the_nfc_of_unicode(pieces: list[tuple[str, str]]) -> None:
    text = "".join(letters + marks * (200 // len(marks)) for letters, marks in pieces)
    assert normalize(text) == unicodedata.normalize("NFC", text)
