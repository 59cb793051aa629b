"""Objectives: fill in the middle and loss weights of marked spans, applied to documents before tokenisation.

Fill in the middle follows Bavarian et al. 2022 (arXiv 2207.14255). A document is cut at two characters into prefix,
middle and suffix. It becomes
    PSM: <prefix mark> prefix <suffix mark> suffix <middle mark> middle
    SPM: <prefix mark> <suffix mark> suffix <middle mark> prefix middle
SPM is their second variant, with the marks in the order of PSM. A hash of the seed and the content of a document
determines whether and where it is cut.

The parts of a document are tokenised separately, so that no token crosses a cut or the border of a span. The same holds
at the end of a prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cdrmix.config import schema_data as schema
from cdrmix.data.tokenizer import TextTokenizer

Ids = np.ndarray[Any, np.dtype[np.uint32]]
Weights = np.ndarray[Any, np.dtype[np.float32]]


class Part(NamedTuple):
    """A piece of text, or a special token if `mark` is not empty, and the loss weight of its tokens.

    continues: the piece is not at the beginning of the document.
    """

    text: str
    weight: float = 1.0
    mark: str = ""
    continues: bool = False


def special_tokens(section: schema.Objectives) -> list[str]:
    """The special tokens that a tokenizer needs for these objectives, in addition to its end-of-text."""
    return [] if section.fim is None else [section.fim.prefix, section.fim.middle, section.fim.suffix]


def encode_documents(
    texts: Sequence[str],
    keys: Sequence[bytes],
    domains: Sequence[str],
    tokenizer: TextTokenizer,
    section: schema.Objectives,
    seed: int,
) -> list[tuple[Ids, Weights | None]]:
    """Ids and loss weights of every document, without an end-of-text.

    keys: content hashes of the documents, 16 bytes each. domains: their names. seed: of fill in the middle.
    Returns for each document uint32 ids [tokens] and float32 weights [tokens], or None if all weights are 1.
    Raises VocabularyError with the name of a special token that the tokenizer does not have.
    """
    marks = {token: np.array([tokenizer.special_id(token)], np.uint32) for token in special_tokens(section)}
    documents = [
        list(parts(text, section, random_numbers(seed, key) if section.fim and _takes(section.fim, domain) else None))
        for text, key, domain in zip(texts, keys, domains, strict=True)
    ]
    pieces = [part for document in documents for part in document if not part.mark]
    encoded = iter(tokenizer.encode_batch([part.text for part in pieces], [part.continues for part in pieces]))
    results: list[tuple[Ids, Weights | None]] = []
    for document in documents:
        ids = [marks[part.mark] if part.mark else next(encoded) for part in document]
        weights = None
        if any(part.weight != 1 and len(of_part) for part, of_part in zip(document, ids, strict=True)):
            lengths = [len(of_part) for of_part in ids]
            weights = np.repeat(np.array([part.weight for part in document], np.float32), lengths)
        results.append((ids[0] if len(ids) == 1 else np.concatenate(ids), weights))
    return results


def random_numbers(seed: int, key: bytes) -> tuple[float, float, float, float]:
    """Four random numbers in [0, 1) of a document: for rearranging it, for SPM, and for the two cuts."""
    digest = hashlib.blake2b(key, digest_size=32, key=seed.to_bytes(8, "big"), person=b"cdrmix fim").digest()
    # 53 bits each, which a float represents exactly
    first, second, third, fourth = (int.from_bytes(digest[at : at + 8], "big") >> 11 for at in (0, 8, 16, 24))
    return first / 2**53, second / 2**53, third / 2**53, fourth / 2**53


def parts(text: str, section: schema.Objectives, numbers: tuple[float, float, float, float] | None) -> Iterator[Part]:
    """The parts of a document in the order of training. numbers: of `random_numbers`; None: no fill in the middle."""
    spans = list(spans_of(text, section.spans))
    fim = section.fim
    if numbers is None or fim is None or numbers[0] >= fim.rate:
        yield from _stretch(text, spans, 0, len(text))
        return
    # one of the len + 1 positions between characters, uniformly
    first, second = sorted(int(number * (len(text) + 1)) for number in numbers[2:])
    prefix, middle, suffix = (
        list(_stretch(text, spans, start, stop)) for start, stop in ((0, first), (first, second), (second, len(text)))
    )
    marks = (Part("", mark=fim.prefix), Part("", mark=fim.suffix), Part("", mark=fim.middle))
    if numbers[1] < fim.spm_fraction:
        yield from (*marks[:2], *suffix, marks[2], *prefix, *middle)
    else:
        yield from (marks[0], *prefix, marks[1], *suffix, marks[2], *middle)


def spans_of(text: str, sections: Sequence[schema.Span]) -> Iterator[tuple[int, int, float]]:
    """(start, stop, weight) in characters of every marked span with its marks, in order.

    A span begins at the first begin mark after the previous span (at one position, the mark that is listed first). It
    ends with the next end mark of its kind. A begin mark without an end mark is ordinary text. Spans do not nest.
    """
    begins = [text.find(section.begin) for section in sections]
    position = 0
    while True:
        begins = [
            text.find(section.begin, position) if 0 <= begin < position else begin
            for begin, section in zip(begins, sections, strict=True)
        ]
        candidates = [(begin, number) for number, begin in enumerate(begins) if begin >= 0]
        if not candidates:
            return
        begin, number = min(candidates)
        section = sections[number]
        end = text.find(section.end, begin + len(section.begin))
        if end < 0:
            begins[number] = -1  # then no later span of this kind has an end mark
            continue
        position = end + len(section.end)
        yield begin, position, section.weight


def _takes(fim: schema.Fim, domain: str) -> bool:
    return fim.domains is None or domain in fim.domains


def _stretch(text: str, spans: Sequence[tuple[int, int, float]], start: int, stop: int) -> Iterator[Part]:
    """The text from start to stop, cut at the borders of the spans."""
    position = start
    for begin, end, weight in spans:
        low, high = max(begin, start), min(end, stop)
        if low < high:
            if position < low:
                yield Part(text[position:low], continues=position > 0)
            yield Part(text[low:high], weight, continues=low > 0)
            position = high
    if position < stop or start == stop == len(text) == 0:
        yield Part(text[position:stop], continues=position > 0)
