"""Objectives: fill in the middle, chains of thought and weighted spans, applied to documents before tokenisation.

Fill in the middle follows Bavarian et al. 2022 (arXiv 2207.14255). A document is cut at two characters into prefix,
middle and suffix. It becomes
    PSM: <prefix mark> prefix <suffix mark> suffix <middle mark> middle
    SPM: <prefix mark> <suffix mark> suffix <middle mark> prefix middle
SPM is their second variant, with the marks in the order of PSM. A hash of the seed and the content of a document
determines whether and where it is cut. A document with a chain of thought is not cut. Long documents can be cut into
texts before, which is their "context-level" variant (section 4.2): else the rows that a long document fills would have
its middle without its prefix and suffix.

The pieces of a document are tokenised separately, so that no token crosses a cut or the border of a span. The same
holds at the end of a prompt. So a chain of thought can be left out of the tokens later.

Every token belongs to one part of the training loss: a rearranged document to `fim`, a chain of thought to `cot`,
everything else to `next_token`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from cdrmix.config import schema_objectives as schema
from cdrmix.data.tokenizer import TextTokenizer

Ids = np.ndarray[Any, np.dtype[np.uint32]]
Weights = np.ndarray[Any, np.dtype[np.float32]]
Parts = np.ndarray[Any, np.dtype[np.uint8]]

PARTS = ("next_token", "fim", "cot")  # of the loss; shards store their numbers, and the keys of weights have the names
NEXT_TOKEN, FIM, COT = range(len(PARTS))


class Piece(NamedTuple):
    """A piece of text, or a special token if `mark` is not empty, and the loss weight of its tokens.

    continues: the piece is not at the beginning of the document. part: of the loss.
    """

    text: str
    weight: float = 1.0
    mark: str = ""
    continues: bool = False
    part: int = NEXT_TOKEN


class EncodedDocument(NamedTuple):
    """The tokens of a document without an end-of-text.

    ids: uint32 [tokens]. weights: float32 [tokens]; None: all 1. parts: uint8 [tokens], the part of the loss of each
    token; None: all NEXT_TOKEN. cuts: numbers of the tokens that begin further documents, each after an end-of-text.
    """

    ids: Ids
    weights: Weights | None
    parts: Parts | None
    cuts: tuple[int, ...] = ()


class Marked(NamedTuple):
    """A marked span: start and stop in characters, its loss weight, its part of the loss."""

    start: int
    stop: int
    weight: float
    part: int = NEXT_TOKEN


def special_tokens(section: schema.Objectives) -> list[str]:
    """The special tokens that a tokenizer needs for these objectives, in addition to its end-of-text."""
    return [] if section.fim is None else [section.fim.prefix, section.fim.middle, section.fim.suffix]


def encode_documents(
    texts: Sequence[str],
    keys: Sequence[bytes],
    domains: Sequence[str],
    tokenizer: TextTokenizer,
    section: schema.Objectives,
) -> list[EncodedDocument]:
    """The tokens of every document.

    keys: content hashes of the documents, 16 bytes each. domains: their names.
    Raises VocabularyError with the name of a special token that the tokenizer does not have.
    """
    marks = {token: np.array([tokenizer.special_id(token)], np.uint32) for token in special_tokens(section)}
    end = tokenizer.end_of_text
    marks[end] = np.array([tokenizer.end_of_text_id], np.uint32)
    documents: list[list[Piece]] = []
    firsts: list[list[int]] = []  # of each document: the pieces that begin a further one
    for text, key, domain in zip(texts, keys, domains, strict=True):
        first, *others = _documents(text, section, key, domain)
        documents.append(first)
        firsts.append([])
        for other in others:
            documents[-1].append(Piece("", mark=end, part=FIM if documents[-1][-1].part == FIM else NEXT_TOKEN))
            firsts[-1].append(len(documents[-1]))
            documents[-1] += other
    plain = [piece for document in documents for piece in document if not piece.mark]
    encoded = iter(tokenizer.encode_batch([piece.text for piece in plain], [piece.continues for piece in plain]))
    results = []
    for document, of_others in zip(documents, firsts, strict=True):
        ids = [marks[piece.mark] if piece.mark else next(encoded) for piece in document]
        results.append(
            EncodedDocument(
                ids[0] if len(ids) == 1 else np.concatenate(ids),
                _repeated([piece.weight for piece in document], ids, np.float32(1)),
                _repeated([piece.part for piece in document], ids, np.uint8(NEXT_TOKEN)),
                tuple(sum(map(len, ids[:first])) for first in of_others),
            )
        )
    return results


def rearranged_documents(
    texts: Sequence[str],
    keys: Sequence[bytes],
    domains: Sequence[str],
    tokenizer: TextTokenizer,
    section: schema.Objectives,
) -> list[EncodedDocument | None]:
    """As `encode_documents` with all documents rearranged; None for one that fill in the middle does not take."""
    if section.fim is None:
        return [None] * len(texts)
    every = section.model_copy(update={"fim": section.fim.model_copy(update={"rate": 1.0})})
    found = encode_documents(texts, keys, domains, tokenizer, every)
    return [document if document.parts is not None and document.parts[0] == FIM else None for document in found]


def chosen_number(seed: int, key: bytes) -> float:
    """A random number in [0, 1) of a document, by which its chains of thought are kept or left out."""
    digest = hashlib.blake2b(key, digest_size=8, key=seed.to_bytes(8, "big"), person=b"cdrmix chains").digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def random_numbers(seed: int, key: bytes) -> tuple[float, float, float, float]:
    """Four random numbers in [0, 1) of a document: for rearranging it, for SPM, and for the two cuts."""
    digest = hashlib.blake2b(key, digest_size=32, key=seed.to_bytes(8, "big"), person=b"cdrmix fim").digest()
    # 53 bits each, which a float represents exactly
    first, second, third, fourth = (int.from_bytes(digest[at : at + 8], "big") >> 11 for at in (0, 8, 16, 24))
    return first / 2**53, second / 2**53, third / 2**53, fourth / 2**53


def pieces(text: str, section: schema.Objectives) -> list[Piece]:
    """The pieces of a document that is not rearranged."""
    return list(_stretch(text, marked_spans(text, section), 0, len(text)))


def _documents(text: str, section: schema.Objectives, key: bytes, domain: str) -> list[list[Piece]]:
    """The pieces of the document, or of the documents that a long one is cut into, in the order of training."""
    spans, fim = marked_spans(text, section), section.fim
    if fim is None or not (fim.domains is None or domain in fim.domains) or any(span.part == COT for span in spans):
        return [list(_stretch(text, spans, 0, len(text)))]
    cuts = _cuts(text, len(text) if fim.characters is None else fim.characters)
    documents = []
    begun = 0  # of text that is not rearranged, whose cuts are left out
    for number, (start, stop) in enumerate(pairwise(cuts)):
        numbers = random_numbers(fim.seed, key if len(cuts) == 2 else key + number.to_bytes(8, "big"))
        if numbers[0] < fim.rate:
            if begun < start:
                documents.append(list(_stretch(text, spans, begun, start)))
            documents.append(list(_rearranged(text, spans, start, stop, fim, numbers)))
            begun = stop
    if begun < len(text) or not documents:
        documents.append(list(_stretch(text, spans, begun, len(text))))
    return documents


def _cuts(text: str, most: int) -> list[int]:
    """Where a text is cut into texts of at most `most` characters: after a line end if there is one. From 0 to its end.

    A text without characters is one text.
    """
    cuts = [0]
    while len(text) - cuts[-1] > most:
        cuts.append(text.rfind("\n", cuts[-1], cuts[-1] + most) + 1 or cuts[-1] + most)
    return [*cuts, len(text)]


def _rearranged(
    text: str,
    spans: Sequence[Marked],
    start: int,
    stop: int,
    fim: schema.Fim,
    numbers: tuple[float, float, float, float],
) -> Iterator[Piece]:
    """The pieces of the text from start to stop, rearranged. numbers: of `random_numbers`."""
    # one of the positions between characters, uniformly
    first, second = sorted(start + int(number * (stop - start + 1)) for number in numbers[2:])
    prefix, middle, suffix = (
        list(_stretch(text, spans, *stretch)) for stretch in ((start, first), (first, second), (second, stop))
    )
    marks = (Piece("", mark=fim.prefix), Piece("", mark=fim.suffix), Piece("", mark=fim.middle))
    if numbers[1] < fim.spm_fraction:
        before = [*marks[:2], *suffix, marks[2], *prefix]
    else:
        before = [marks[0], *prefix, marks[1], *suffix, marks[2]]
    if fim.loss == "middle":
        before = [piece._replace(weight=0.0) for piece in before]
    yield from (piece._replace(part=FIM) for piece in (*before, *middle))


def marked_spans(text: str, section: schema.Objectives) -> list[Marked]:
    """The spans and the chains of thought of a text, in order."""
    marks = [(span.begin, span.end) for span in section.spans]
    if section.cot is None:
        return [Marked(start, stop, section.spans[kind].weight) for start, stop, kind in _marked(text, marks)]
    marks.append((section.cot.begin, section.cot.end))
    return [
        Marked(start, stop, section.spans[kind].weight) if kind < len(section.spans) else Marked(start, stop, 1.0, COT)
        for start, stop, kind in _marked(text, marks, with_space=len(section.spans))
    ]


def _marked(
    text: str, marks: Sequence[tuple[str, str]], with_space: int | None = None
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, number of its marks) in characters of every marked span with its marks, in order.

    A span begins at the first begin mark after the previous span (at one position, the mark that is listed first). It
    ends with the next end mark of its kind. A begin mark without an end mark is ordinary text. Spans do not nest.
    with_space: number of the marks whose spans have the white space that follows them.
    """
    begins = [text.find(begin) for begin, _ in marks]
    position = 0
    while True:
        begins = [
            text.find(mark, position) if 0 <= begin < position else begin
            for begin, (mark, _) in zip(begins, marks, strict=True)
        ]
        candidates = [(begin, number) for number, begin in enumerate(begins) if begin >= 0]
        if not candidates:
            return
        begin, number = min(candidates)
        begin_mark, end_mark = marks[number]
        end = text.find(end_mark, begin + len(begin_mark))
        if end < 0:
            begins[number] = -1  # then no later span of this kind has an end mark
            continue
        position = end + len(end_mark)
        while number == with_space and position < len(text) and text[position].isspace():
            position += 1
        yield begin, position, number


def _repeated(values: Sequence[float], ids: Sequence[Ids], neutral: Any) -> Any:
    """Each value for each token of its piece, in the dtype of `neutral`; None if they are all neutral."""
    if all(value == neutral for value, of_piece in zip(values, ids, strict=True) if len(of_piece)):
        return None
    return np.repeat(np.array(values, neutral.dtype), [len(of_piece) for of_piece in ids])


def _stretch(text: str, spans: Sequence[Marked], start: int, stop: int) -> Iterator[Piece]:
    """The text from start to stop, cut at the borders of the spans."""
    position = start
    # From the first span that ends behind `start`: a text has many stretches and may have many spans.
    for number in range(bisect_right(spans, start, key=lambda span: span.stop), len(spans)):
        span = spans[number]
        if span.start >= stop:
            break
        low, high = max(span.start, start), min(span.stop, stop)
        if low < high:
            if position < low:
                yield Piece(text[position:low], continues=position > 0)
            yield Piece(text[low:high], span.weight, continues=low > 0, part=span.part)
            position = high
    if position < stop or start == stop == len(text) == 0:
        yield Piece(text[position:stop], continues=position > 0)
