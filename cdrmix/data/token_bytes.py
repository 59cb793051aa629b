"""The bytes of tokens: those that an id stands for when it is decoded, and those of the text that it was encoded from.

The two are equal for a lossless tokenizer. Bits per byte count the bytes of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cdrmix.errors import VocabularyError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # as which byte fallback writes one byte of a character

Counts = np.ndarray[Any, np.dtype[np.uint32]]


def byte_alphabet() -> dict[str, int]:
    """The characters that represent bytes in byte-level BPE: printable Latin-1 itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def byte_level(vocabulary: Mapping[str, int], added: Mapping[int, bool], name: str, *, strict: bool) -> list[bytes]:
    """The bytes of each id of a byte-level tokenizer; b'' for special tokens and unused ids.

    vocabulary: token to id. added: id of each added token, and whether it is special.
    strict: raises VocabularyError for a token that is not in the byte alphabet, which otherwise has its own bytes.
    """
    alphabet = byte_alphabet()
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        if token_id in added:
            table[token_id] = b"" if added[token_id] else token.encode("utf-8")
        elif all(character in alphabet for character in token):
            table[token_id] = bytes([alphabet[character] for character in token])
        elif strict:
            raise VocabularyError(
                f"{name} is not byte-level BPE: its token {token!r} is not written in the byte alphabet; use "
                "a tokenizer such as GPT-2's, leave data.tokenizer.path out to train one on the corpus, or set "
                "data.tokenizer.lossless: false to accept a tokenizer that changes text"
            )
        else:
            table[token_id] = token.encode("utf-8")
    return table


def decoded(
    vocabulary: Mapping[str, int],
    added: Mapping[int, bool],
    decode_batch: Callable[[list[list[int]]], list[str]],
    context: int,
    steps: Sequence[str],
) -> list[bytes]:
    """The bytes of each id within a text, by any decoder; b'' for special tokens and unused ids.

    A decoder removes the space at the start of a text, or the space at its end. So each id is decoded next to
    `context`, the id of an ordinary token, whose text is then removed. steps: the types of the steps of the decoder.
    """
    after = "BPEDecoder" not in steps  # its tokens end with the space, those of other decoders begin with it
    ids = range(max(vocabulary.values(), default=-1) + 1)
    (alone,) = decode_batch([[context]])
    texts = decode_batch([[context, token] if after else [token, context] for token in ids])
    table = [(text.removeprefix(alone) if after else text.removesuffix(alone)).encode("utf-8") for text in texts]
    for token, token_id in vocabulary.items():
        if added.get(token_id):
            table[token_id] = b""
        elif "ByteFallback" in steps and (byte := BYTE_TOKEN.fullmatch(token)):
            table[token_id] = bytes([int(byte[1], 16)])
    return table


def text_bytes_of_tokens(text: str, ends: Sequence[int]) -> Counts:
    """uint32 [tokens]: the UTF-8 bytes of `text` that each token stands for.

    ends: where each token ends in the text, in characters. A character belongs to the first token that ends behind it.
    So the sum is the bytes of the text, without those behind the last token.
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    bytes_before = np.concatenate([[0], np.cumsum(sizes)])
    reached = np.maximum.accumulate(np.asarray(ends, np.int64)) if len(ends) else np.zeros(0, np.int64)
    return np.diff(bytes_before[reached], prepend=0).astype(np.uint32)
