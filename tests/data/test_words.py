"""Unicode's tables, words, shingles and fingerprints against Python's str and re, and the formulas in Python."""

from __future__ import annotations

import re
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_words import BITS, mixed, words

from cdrmix import _dedup
from cdrmix.data.dedup.minhash import simhash

CODE_POINTS = 0x110000
SCALARS = [*range(0xD800), *range(0xE000, CODE_POINTS)]  # what UTF-8 holds

# Bits of csrc/unicode.hpp that a character's own methods tell; the other two show in how a capital sigma lowers.
PROPERTIES = {
    1: lambda ch: ch.isalnum() or ch == "_",
    2: str.isalpha,
    4: str.isspace,
    8: str.isnumeric,
    64: str.isupper,
    128: lambda ch: unicodedata.category(ch).startswith("P"),
}
CASED, CASE_IGNORABLE = 16, 32


def reference_words(text: str) -> list[int]:
    """The hashes of a text's words."""
    hashes = []
    for word in words(text):
        encoded, state = word.encode(), 0x9E3779B97F4A7C15
        for start in range(0, len(encoded), 8):
            state = mixed(state ^ int.from_bytes(encoded[start : start + 8], "little"))
        hashes.append(mixed(state ^ len(encoded)))
    return hashes


def reference_shingles(text: str, ngram: int) -> list[int]:
    hashes = reference_words(text)
    found = []
    for start in range(max(1, len(hashes) - ngram + 1) if hashes else 0):
        value = 0
        for one in hashes[start : start + ngram]:
            value = (value * 0xD1342543DE82EF95 + one) & BITS
        found.append(mixed(value))
    return found


def reference_simhash(text: str) -> int:
    hashes = reference_words(text)
    return sum((2 * sum(h >> bit & 1 for h in hashes) > len(hashes)) << bit for bit in range(64))


@pytest.fixture(scope="module")
def newer() -> set[str]:
    """Characters about which this Python knows something and Unicode 14 nothing: none in Python 3.11."""
    table = _dedup.unicode_properties()
    found = {chr(c) for c in SCALARS if table[c] == 0 and any(has(chr(c)) for has in PROPERTIES.values())}
    assert not found or unicodedata.unidata_version > "14.0.0"
    return found


def without(text: str, characters: set[str]) -> str:
    return "".join(ch for ch in text if ch not in characters) if characters else text


@pytest.mark.parametrize("bit", PROPERTIES)
def test_properties_are_those_of_python(bit: int, newer: set[str]) -> None:
    table = _dedup.unicode_properties()
    assert table.shape == (CODE_POINTS,)
    wrong = [c for c in range(CODE_POINTS) if bool(table[c] & bit) != PROPERTIES[bit](chr(c)) and chr(c) not in newer]
    assert [hex(c) for c in wrong] == []


@pytest.mark.slow  # every character; the quick tests have those that differ
def test_case_decides_how_a_sigma_lowers(newer: set[str]) -> None:
    """Before, behind and between letters: every character's being cased or ignorable, and its own lower case."""
    for pattern in ("{}", "{}Σ", "a{}Σ", "aΣ{}", "aΣ{}b"):
        text = "\n".join(pattern.format(chr(c)) for c in SCALARS if chr(c) not in newer)
        assert _dedup.lower(text.encode()).decode() == text.lower()


def test_cased_and_ignorable_exclude_each_other() -> None:
    table = _dedup.unicode_properties()
    assert table[ord("a")] & CASED
    assert table[ord("'")] & CASE_IGNORABLE
    assert not np.any((table & CASED != 0) & (table & CASE_IGNORABLE != 0))


# What lowers unlike its neighbours, changes its number of bytes, or ends a word for one definition but not for another.
special = st.sampled_from(
    [
        *"ΣσςİıKẞßȺⱥᎠꭰ𐐀𐐨ǅⅠⓐ²½٣〇日本ーท็หนิ한",  # noqa: RUF001 their likeness to others is meant
        *"_-'.·\u0301\u0307\u0345\u200d\u00ad\ufeff\0\x1c\x85\u2028\U0010ffff",
    ]
)
# Runs of ASCII as long as a step of 16 bytes or a buffer of 4096, and a little more or less.
run = st.builds(
    lambda character, length: character * length,
    st.sampled_from(["a", "Z", "9", "_", " ", "-"]),
    st.integers(0, 40) | st.integers(4070, 4110) | st.just(12_289),
)
texts = st.lists(st.text(max_size=12) | special | run | st.sampled_from(["word ", " Word", "\n"]), max_size=25).map(
    "".join
)


@given(text=texts)
def test_lower_case_is_that_of_python(text: str, newer: set[str]) -> None:
    text = without(text, newer)
    assert _dedup.lower(text.encode()).decode() == text.lower()


@given(text=texts, ngram=st.integers(1, 7))
def test_shingles_are_those_of_the_definition(text: str, ngram: int, newer: set[str]) -> None:
    text = without(text, newer)
    (found,) = _dedup.shingle_hashes(_dedup.Texts([text]), ngram)
    assert found.tolist() == reference_shingles(text, ngram)


def test_characters_of_scripts_without_spaces_are_words() -> None:
    """Also their vowel signs, but not their punctuation. Every assigned character of their blocks is compared."""
    assert words("GPT模型、ka 한국어 กินแล้ว。ཀ་ཁ") == ["gpt", "模", "型", "ka", "한국어", *"กินแล้ว", "ཀ", "ཁ"]
    blocks = [*range(0xE00, 0x10A0), *range(0x1780, 0x1800), *range(0x2E80, 0x3400), *range(0xFF00, 0xFFF0)]
    text = "a".join(chr(code) + chr(code) for code in blocks if unicodedata.category(chr(code)) != "Cn")
    (found,) = _dedup.shingle_hashes(_dedup.Texts([text]), 1)
    assert found.tolist() == reference_shingles(text, 1)


def test_words_with_spaces_are_those_of_python() -> None:
    text = " ".join(chr(code) * 3 + "x1_" for code in range(0xE00) if not 0xD800 <= code < 0xE000) + " 한국어 ἀβγ"
    assert words(text) == re.findall(r"\w+", text.lower())


@given(documents=st.lists(texts, max_size=4))
def test_fingerprints_are_those_of_the_definition(documents: list[str], newer: set[str]) -> None:
    documents = [without(document, newer) for document in documents]
    found = simhash(documents)
    assert found.dtype == np.uint64
    assert found.tolist() == [reference_simhash(document) for document in documents]


def test_the_same_scratch_serves_texts_of_any_length() -> None:
    """What a long text leaves in the buffers is not seen by the next one."""
    documents = ["word" * 3000, "", "b", "x" * 4096, "y" * 4097 + " z", " " * 5000, "ä" * 2048 + "b", "one two"] * 2
    for ngram in (1, 2, 5000):
        for text, found in zip(documents, _dedup.shingle_hashes(_dedup.Texts(documents), ngram), strict=True):
            assert found.tolist() == reference_shingles(text, ngram)


def test_words_that_end_with_the_buffer() -> None:
    """Of every length about a hash block's 8 bytes, ending about 4096, where the buffer ends; also beyond ASCII."""
    documents = [
        " " * (end - size) + letter * size + tail
        for end in range(4072, 4102)
        for size in range(1, 26)
        for letter, tail in (("a", " z"), ("a", "é z"))
    ]
    documents += ["é" * (end - size) + " " + "a" * size + " z" for end in range(2030, 2060) for size in range(1, 18)]
    for text, found in zip(documents, _dedup.shingle_hashes(_dedup.Texts(documents), 1), strict=True):
        assert found.tolist() == reference_shingles(text, 1)


def test_many_votes_overflow_no_counter() -> None:
    """More words than the 255 that are counted at a time, in all and of one kind."""
    text = "yes no no " * 200 + "maybe " * 1000
    assert simhash([text]).tolist() == [reference_simhash(text)]


@pytest.mark.parametrize("end", [b"\xff", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\x80", b"\xf8\x88\x80", b"\xed\xa0"])
def test_text_that_is_no_utf8_is_read_within_its_bounds(end: bytes) -> None:
    """What stands behind a text that breaks off within a character changes nothing."""
    for text in (end, b"word " + end, end * 3000):
        alone = _dedup.shingle_hashes(_dedup.Texts(text, np.array([0, len(text)])), 1)
        followed = _dedup.shingle_hashes(_dedup.Texts(text + b"\xa9\xac\x80word", np.array([0, len(text)])), 1)
        assert [found.tolist() for found in alone] == [found.tolist() for found in followed]
