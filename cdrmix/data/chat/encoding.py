"""Encoding: from a rendered conversation to token ids and loss weights.

The ids are those that the `tokenizers` package gives for the whole text, as transformers encodes it. So no token is cut
at the border of a turn. The special tokens get marked names in a copy of the tokenizer: only what the template wrote
is written with the mark, so that the same name in the contents is text.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from cdrmix.data.chat.rendering import TEXT_BEGIN, Rendered
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.data.tokenizer_package import failures
from cdrmix.errors import VocabularyError
from cdrmix.json_text import parse_json

MARK = TEXT_BEGIN  # normalised text does not have this character
Array = np.ndarray[Any, np.dtype[Any]]


class Encoded(NamedTuple):
    """The tokens of a document. ids: uint32. weights: float32, 1 where trained and otherwise 0.

    token_bytes: uint32, UTF-8 bytes of the text that each token stands for; a special token has none.
    """

    ids: Array
    weights: Array
    token_bytes: Array


class ChatEncoder:
    """Encodes rendered conversations with the vocabulary of a tokenizer. Raises VocabularyError if it cannot."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._end_of_text_id = tokenizer.end_of_text_id
        self._begin_id = None if tokenizer.begin_of_text is None else tokenizer.first_id
        try:
            self._tokenizer = Tokenizer.from_buffer(_with_marked_names(tokenizer.json_bytes))
        except ValueError as error:
            raise VocabularyError(
                f"the tokenizer merges ordinary text into a special token, so contents could end turns: {error}"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: Sequence[Rendered]) -> list[Encoded]:
        """The tokens of each document.

        The last token is the end of text, added unless the template has written it. It is trained on where it is the
        end of the assistant's turn: behind a trained span that does not end with a special token. A begin-of-text token
        that the template writes is left out, since every document of the shards begins with it.
        """
        with failures():
            encoded = self._tokenizer.encode_batch([_marked(text) for text in texts], add_special_tokens=False)
        return [self._finished(text, result) for text, result in zip(texts, encoded, strict=True)]

    def _finished(self, text: Rendered, result: Any) -> Encoded:
        ids = np.array(result.ids, np.uint32)
        weights = np.zeros(len(ids), np.float32)
        starts, stops = [start for start, _ in result.offsets], [stop for _, stop in result.offsets]
        for start, stop in text.trained:
            # from the token with the first character to that with the last one, as transformers' mask
            first = bisect_left(stops, _position(text, start) + 1)
            last = bisect_left(starts, _position(text, stop))
            weights[first:last] = 1
        ends = _byte_ends(text)
        sizes = np.diff(np.maximum.accumulate(ends[stops]), prepend=0).astype(np.uint32)
        if not len(ids) or ids[-1] != self._end_of_text_id:
            ended = text.special and text.special[-1][1] == len(text.text)
            trained = bool(text.trained) and text.trained[-1][1] == len(text.text) and not ended
            ids = np.append(ids, np.uint32(self._end_of_text_id))
            weights = np.append(weights, np.float32(trained))
            sizes = np.append(sizes, np.uint32(0))
        sizes[-1] += ends[-1] - sizes.sum(dtype=np.int64)  # white space at the end that no token stands for
        begun = int(ids[0] == self._begin_id)
        return Encoded(ids[begun:], weights[begun:], sizes[begun:])


def _byte_ends(text: Rendered) -> Array:
    """int64: UTF-8 bytes before each character of the marked text and at its end, without those of special tokens."""
    sizes = np.array([0, *(len(character.encode("utf-8")) for character in text.text)], np.int64)
    for start, stop in text.special:
        sizes[start + 1 : stop + 1] = 0
    ends = np.cumsum(sizes)
    return np.insert(ends, [start for start, _ in text.special], ends[[start for start, _ in text.special]])


def _with_marked_names(json_bytes: bytes) -> bytes:
    """A tokenizer.json whose special tokens have MARK before their names, and no post-processor."""
    described = parse_json(json_bytes)
    names = set()
    for token in described["added_tokens"]:
        if token["special"]:
            names.add(token["content"])
            token["content"] = MARK + token["content"]
    model = described["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {MARK + name if name in names else name: number for name, number in vocabulary.items()}
    else:  # Unigram: [piece, score]
        model["vocab"] = [[MARK + piece if piece in names else piece, score] for piece, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = MARK + model["unk_token"]
    described["post_processor"] = None  # that of byte-level BPE changes offsets
    return json.dumps(described, ensure_ascii=False).encode("utf-8")


def _marked(text: Rendered) -> str:
    """The text with MARK before every special token."""
    pieces, end = [], 0
    for start, _ in text.special:
        pieces += [text.text[end:start], MARK]
        end = start
    return "".join([*pieces, text.text[end:]])


def _position(text: Rendered, position: int) -> int:
    """A position of the text in the marked text; at a special token, that of its mark."""
    return position + bisect_left(text.special, (position, 0))
