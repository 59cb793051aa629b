"""The original text of a split whose tokenizer changes text: the text, and how much of it each token stands for.

Two files of the shards hold it:
    <split>.token-bytes.bin  uint32 [tokens], UTF-8 bytes of the text that each token stands for
    <split>.text.bin         the text of all documents, UTF-8, end to end
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cdrmix.durable import ChecksummedFile

Array = np.ndarray[Any, np.dtype[Any]]

TOKEN_BYTES, TEXT = "token-bytes", "text"


class OriginalTextWriter:
    """Writes the two files, token by token in the order of the split."""

    def __init__(self, create: Callable[[str], ChecksummedFile]) -> None:
        """create: makes the file of the split with these contents."""
        self._token_bytes, self._text = create(TOKEN_BYTES), create(TEXT)

    def add(self, token_bytes: Array, text: bytes) -> None:
        """Appends integers [tokens], whose sum is the length of the text."""
        assert int(token_bytes.sum()) == len(text), f"{token_bytes.sum()} bytes of tokens for a text of {len(text)}"
        self._token_bytes.write(token_bytes.astype("<u4").tobytes())
        self._text.write(text)

    def add_gap(self, tokens: int) -> None:
        """Appends tokens that stand for no text."""
        self.add(np.zeros(tokens, np.uint32), b"")

    @property
    def files(self) -> tuple[ChecksummedFile, ChecksummedFile]:
        """The files to close."""
        return self._token_bytes, self._text


class OriginalText:
    """The two files, memory-mapped. token_bytes: uint32 [tokens]. text: uint8 [bytes]."""

    def __init__(self, token_bytes: Array, text: Array) -> None:
        self._token_bytes, self._text = token_bytes, text

    def of(self, start: int, stop: int) -> Array:
        """uint32 [stop - start]: the bytes of each of the tokens number start .. stop - 1."""
        return self._token_bytes[start:stop]

    def count(self, start: int, stop: int) -> int:
        """The bytes of the tokens number start .. stop - 1."""
        return int(self._token_bytes[start:stop].sum(dtype=np.int64))

    def text(self, start: int, stop: int) -> bytes:
        """The bytes number start .. stop - 1 of the text of all documents."""
        return self._text[start:stop].tobytes()

    def documents(self, starts: Array) -> Iterator[bytes]:
        """The text of the documents whose tokens end before starts[1:], in order."""
        position = 0
        for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            end = position + self.count(start + 1, stop + 1)
            yield self._text[position:end].tobytes()
            position = end
