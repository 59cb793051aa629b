"""Objectives: rearranged documents are the same text at the same cuts, weights lie on the marked spans alone."""

from __future__ import annotations

import hashlib
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdrmix.config.schema_objectives import Fim, Objectives, Span
from cdrmix.data.objectives import EncodedDocument, encode_documents, marked_spans, random_numbers, special_tokens
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import VocabularyError

FIM = Fim(rate=1.0, spm_fraction=0.5)
MARKS = special_tokens(Objectives(fim=FIM))
CORPUS = ["def square(x):\n    return x * x\n", "naïve Ærøskøbing 東京 🙂 <think>a</think>"] * 3
TOKENIZER = TextTokenizer.train(CORPUS, vocab_size=320, end_of_text="<|endoftext|>", special_tokens=MARKS)
PREFIX, MIDDLE, SUFFIX = (TOKENIZER.special_id(mark) for mark in MARKS)


def key_of(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]


def encode(texts: list[str], section: Objectives, *, domain: str = "text") -> list[EncodedDocument]:
    return encode_documents(texts, [key_of(text) for text in texts], [domain] * len(texts), TOKENIZER, section)


def seeded(fim: Fim, seed: int) -> Objectives:
    return Objectives(fim=fim.model_copy(update={"seed": seed}))


def taken_apart(ids: list[int]) -> tuple[str, str, bytes]:
    """(kind, the text put back in order, where its prefix ends or b'' for SPM), read off the marks."""
    if PREFIX not in ids:
        return "plain", TOKENIZER.decode(ids), b""
    assert ids[0] == PREFIX
    assert sorted(token for token in ids if token in (PREFIX, MIDDLE, SUFFIX)) == sorted((PREFIX, MIDDLE, SUFFIX))
    suffix_at, middle_at = ids.index(SUFFIX), ids.index(MIDDLE)
    assert suffix_at < middle_at
    prefix, suffix, middle = (
        TOKENIZER.decode_bytes(stretch)
        for stretch in (ids[1:suffix_at], ids[suffix_at + 1 : middle_at], ids[middle_at + 1 :])
    )
    return "rearranged", (prefix + middle + suffix).decode(), prefix


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.integers(0, 2**63 - 1))
def test_a_rearranged_document_is_the_same_text(text: str, seed: int) -> None:
    ((ids, weights, parts, _),) = encode([text], seeded(FIM, seed))
    assert ids.dtype == np.uint32
    assert weights is None
    assert parts is not None
    assert set(parts.tolist()) == {1}
    kind, back, prefix = taken_apart(ids.tolist())
    assert (kind, back) == ("rearranged", text)
    prefix.decode()  # cuts are between characters


def test_without_objectives_a_document_is_its_tokens() -> None:
    for text, (ids, weights, parts, _) in zip(CORPUS, encode(CORPUS, Objectives()), strict=True):
        assert ids.tolist() == TOKENIZER.encode(text)
        assert weights is None
        assert parts is None


def test_rates_and_cuts() -> None:
    """4,000 documents of 40 characters; five standard deviations are passed once in 10^6."""
    texts = [f"{number:04}" + "x" * 36 for number in range(4000)]
    rearranged, as_spm, prefixes = 0, 0, []
    for text, (ids, *_) in zip(texts, encode(texts, Objectives(fim=Fim(rate=0.25, spm_fraction=0.2))), strict=True):
        kind, back, _ = taken_apart(ids.tolist())
        assert back == text
        if kind == "rearranged":
            rearranged += 1
            _, spm, first, second = random_numbers(1, key_of(text))
            low, high = sorted((int(first * 41), int(second * 41)))
            stretch = ids.tolist()[1 : ids.tolist().index(SUFFIX)]
            expected = "" if spm < 0.2 else text[:low]
            assert TOKENIZER.decode(stretch) == expected
            as_spm += spm < 0.2
            prefixes.append(low)
            middle = TOKENIZER.decode(ids.tolist()[ids.tolist().index(MIDDLE) + 1 :])
            assert middle == (text[:high] if spm < 0.2 else text[low:high])
    assert abs(rearranged - 1000) < 5 * math.sqrt(4000 * 0.25 * 0.75)
    assert abs(as_spm - 0.2 * rearranged) < 5 * math.sqrt(rearranged * 0.2 * 0.8)
    # the lower of two numbers uniform on 0 .. 40: mean 13.33, standard deviation 9.7
    assert abs(np.mean(prefixes) - 40 / 3) < 5 * 9.7 / math.sqrt(rearranged) + 0.5


def test_it_depends_on_the_document_alone() -> None:
    section = Objectives(fim=Fim(rate=0.5))
    texts = [f"document {number} of some length" for number in range(50)]
    together = encode(texts, section)
    for position in (0, 17, 49):
        np.testing.assert_array_equal(together[position][0], encode([texts[position]], section)[0][0])
    for one, other in zip(together[::-1], encode(texts[::-1], section), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
    assert any(
        len(one[0]) != len(other[0])
        for one, other in zip(together, encode(texts, seeded(Fim(rate=0.5), 2)), strict=True)
    )


def test_only_the_domains_named_are_rearranged() -> None:
    section = Objectives(fim=Fim(rate=1.0, domains=["code"]))
    assert PREFIX in encode(CORPUS, section, domain="code")[0][0]
    assert PREFIX not in encode(CORPUS, section, domain="web")[0][0]


def test_text_that_spells_a_mark_is_text() -> None:
    text = f"{MARKS[0]}a{MARKS[1]}"
    assert encode([text], Objectives())[0][0].tolist() == TOKENIZER.encode(text)
    assert not {PREFIX, MIDDLE, SUFFIX} & set(TOKENIZER.encode(text))


def test_a_tokenizer_without_the_marks() -> None:
    plain = TextTokenizer.train(CORPUS, vocab_size=300, end_of_text="<|endoftext|>")
    with pytest.raises(VocabularyError, match=r"no special token '<\|fim_prefix\|>'; .* are '<\|endoftext\|>'"):
        encode_documents(["a"], [b"k"], ["text"], plain, Objectives(fim=FIM))


SPANS = [Span(begin="<t>", end="</t>", weight=0.25), Span(begin="[", end="]", weight=0.0)]
PATTERN = re.compile(r"<t>.*?</t>|\[.*?\]", re.DOTALL)  # leftmost, in the order listed, to the nearest end
marked = st.lists(st.sampled_from(["<t>", "</t>", "[", "]", "a", "é\n", "<"]), max_size=14).map("".join)


@given(marked)
def test_spans_are_what_the_regular_expression_finds(text: str) -> None:
    expected = [(*match.span(), 0.25 if match[0][0] == "<" else 0.0) for match in PATTERN.finditer(text)]
    assert [span[:3] for span in marked_spans(text, Objectives(spans=SPANS))] == expected


@given(marked, st.booleans())
def test_weights_lie_on_the_spans(text: str, rearrange: bool) -> None:
    """Every byte has its span's weight, also where the document is rearranged; marks of the rearrangement have 1."""
    wanted: dict[int, float] = dict.fromkeys(range(len(text)), 1.0)
    for match in PATTERN.finditer(text):
        wanted |= dict.fromkeys(range(*match.span()), 0.25 if match[0][0] == "<" else 0.0)
    section = Objectives(fim=FIM if rearrange else None, spans=SPANS)
    ((ids, weights, *_),) = encode([text], section)
    values = [1.0] * len(ids) if weights is None else weights.tolist()
    assert weights is None or (weights.dtype == np.float32 and len(weights) == len(ids))
    lengths = TOKENIZER.byte_lengths()
    by_byte = [weight for token, weight in zip(ids.tolist(), values, strict=True) for _ in range(lengths[token])]
    expected = [wanted[position] for position, character in enumerate(text) for _ in character.encode()]
    assert sorted(by_byte) == sorted(expected)
    if not rearrange:
        assert by_byte == expected
    assert all(value == 1 for token, value in zip(ids.tolist(), values, strict=True) if not lengths[token])
    assert (weights is None) == (set(expected) <= {1.0})
