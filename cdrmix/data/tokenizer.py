"""The tokenizer: byte-level BPE over UTF-8, trained on the corpus or loaded from a tokenizer.json, lossless.

The `tokenizers` package trains and encodes. This module guarantees two properties: decoding encoded text gives its
exact bytes, and no text is encoded to the end-of-text id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from cdrmix.errors import ConfigError, VocabularyError

# Pre-tokenisation: BPE tokens never cross these cuts. The alternatives are a word with one preceding character ("
# word", ".name", "(self"); up to three digits; punctuation with the following line end and indentation (":\n        ");
# white space over line ends with the next indentation; white space. Bytes per held-out token on the Python 3.11
# standard library with a vocabulary of 4,096: 3.71. The GPT-2 pattern has 3.45. A pattern that separates line ends and
# indentation, like that of GPT-4, has 3.46.
PRETOKENIZER_PATTERN = (
    r"[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+(?:\s*\n\s*)?"
    r"|\s*\n\s*"
    r"|\s+"
)
PIECE_CHARACTERS = 2**20  # longer texts are encoded in pieces, which bounds memory and uses all cores
GROUP_CHARACTERS = 2**22  # encoded by one call


class TextTokenizer:
    """Encodes text to ids and decodes ids. `train` and `load` make one. json_bytes: the contents of its tokenizer.json.

    vocab_size: the largest id plus 1. fingerprint: SHA-256 of `json_bytes`, hexadecimal.
    """

    def __init__(self, json_bytes: bytes, end_of_text: str, *, name: str = "tokenizer.json") -> None:
        self.json_bytes = json_bytes
        self.fingerprint = hashlib.sha256(json_bytes).hexdigest()
        self.end_of_text = end_of_text
        try:
            self._tokenizer = Tokenizer.from_buffer(json_bytes)
        except ValueError as error:
            raise VocabularyError(f"{name} is not a tokenizer.json that can be read: {error}") from error
        # Otherwise text that equals the name of a special token would become that token.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._bytes_of_id = _bytes_of_ids(self._tokenizer, name)
        self.vocab_size = len(self._bytes_of_id)
        end_of_text_id = self._tokenizer.token_to_id(end_of_text)
        if end_of_text_id is None:
            special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
            raise VocabularyError(
                f"{name} has no token {end_of_text!r}; set data.tokenizer.end_of_text to one of its special tokens: "
                f"{', '.join(map(repr, special)) or '(it has none)'}"
            )
        self.end_of_text_id: int = end_of_text_id
        self._bytes_of_id[end_of_text_id] = b""
        self._check_lossless(name)

    @classmethod
    def load(cls, path: str | Path, end_of_text: str | None = None) -> TextTokenizer:
        """Loads a tokenizer.json. end_of_text: the name of its end-of-text token; None: its only special token.

        Raises ConfigError if the file does not exist, VocabularyError if it is not a lossless byte-level tokenizer.
        """
        path = Path(path)
        try:
            json_bytes = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"data.tokenizer.path: cannot read {path}: {error.strerror}") from error
        return cls(json_bytes, end_of_text or _only_special_token(json_bytes, str(path)), name=str(path))

    @classmethod
    def train(
        cls, texts: Iterable[str], *, vocab_size: int, end_of_text: str, special_tokens: Sequence[str] = ()
    ) -> TextTokenizer:
        """Trains a tokenizer with at most `vocab_size` ids; fewer if the text has no more pairs to merge.

        special_tokens: in addition to `end_of_text`, such as the marks of data.objectives.fim.
        The result depends only on the texts and their order, not on the number of threads.
        """
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PRETOKENIZER_PATTERN), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[
                AddedToken(token, special=True, normalized=False) for token in (end_of_text, *special_tokens)
            ],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
        return cls(tokenizer.to_str(pretty=True).encode("utf-8"), end_of_text, name="the trained tokenizer")

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without an end-of-text id."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray[Any, np.dtype[np.uint32]]]:
        """uint32 ids of each text, encoded on all cores."""
        encoded: list[list[np.ndarray[Any, np.dtype[np.uint32]]]] = [[] for _ in texts]
        for group in _groups(texts):
            # The results of the package take about 100 bytes per token, so each group is converted to arrays.
            results = self._tokenizer.encode_batch_fast([piece for _, piece in group], add_special_tokens=False)
            for (index, _), result in zip(group, results, strict=True):
                encoded[index].append(np.array(result.ids, np.uint32))
        return [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in encoded]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of the ids. Special and unused ids have none."""
        table = self._bytes_of_id
        return b"".join([table[token] for token in ids if token < len(table)])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids. Bytes that are not UTF-8 (ids cut within a character) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_with_special_tokens(self, ids: Iterable[int]) -> str:
        """The text of the ids, with the names of special tokens."""
        parts: list[bytes] = []
        for token in ids:
            known = self._bytes_of_id[token] if token < len(self._bytes_of_id) else b""
            parts.append(known or (self._tokenizer.id_to_token(token) or "").encode("utf-8"))
        return b"".join(parts).decode("utf-8", errors="replace")

    def special_id(self, token: str) -> int:
        """The id of a special token. Raises VocabularyError if there is none, or if text can be encoded to it."""
        added = self._tokenizer.get_added_tokens_decoder()
        special = {entry.content: number for number, entry in added.items() if entry.special}
        if token not in special:
            raise VocabularyError(
                f"the tokenizer has no special token {token!r}; its special tokens are "
                f"{', '.join(map(repr, special)) or '(none)'}. Name one of them in data.objectives.fim, or leave "
                "data.tokenizer.path out to train a tokenizer that has it"
            )
        if special[token] in self.encode(f"{token} {token}"):
            raise VocabularyError(f"the tokenizer merges ordinary text into {token!r}; name another special token")
        return special[token]

    def byte_lengths(self) -> list[int]:
        """The number of bytes of each id."""
        return [len(token) for token in self._bytes_of_id]

    def _check_lossless(self, name: str) -> None:
        """Refuses a tokenizer that changes text, or that encodes text to the end-of-text id."""
        model = json.loads(self.json_bytes)["model"]
        spelled = any("".join(pair) == self.end_of_text for pair in _pairs(model.get("merges", [])))
        probe = f"{_probe()}{self.end_of_text} {self.end_of_text}"
        ids = self.encode(probe)
        if spelled or self.end_of_text_id in ids:
            raise VocabularyError(
                f"{name} merges ordinary text into its end-of-text token {self.end_of_text!r}, so text could end "
                "documents; set data.tokenizer.end_of_text to another special token"
            )
        if self.decode_bytes(ids) != probe.encode("utf-8") or model.get("dropout"):
            raise VocabularyError(
                f"{name} does not give text back unchanged; data.tokenizer.path takes byte-level BPE without "
                "normalizer, prefix space or dropout (such as GPT-2's), or leave it out to train one on the corpus"
            )


def pieces(text: str) -> Iterator[str]:
    """`text` in pieces of at most PIECE_CHARACTERS, cut after line ends if possible."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = text.rfind("\n", start, start + PIECE_CHARACTERS) + 1 or start + PIECE_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]


def _groups(texts: Sequence[str]) -> Iterator[list[tuple[int, str]]]:
    """The pieces of all texts as (index of the text, piece), in lists of about GROUP_CHARACTERS."""
    group: list[tuple[int, str]] = []
    characters = 0
    for index, text in enumerate(texts):
        for piece in pieces(text):
            group.append((index, piece))
            characters += len(piece)
            if characters >= GROUP_CHARACTERS:
                yield group
                group, characters = [], 0
    if group:
        yield group


def byte_alphabet() -> dict[str, int]:
    """The characters that represent bytes in byte-level BPE: printable Latin-1 itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _bytes_of_ids(tokenizer: Tokenizer, name: str) -> list[bytes]:
    """The bytes of each id; b'' for special tokens and unused ids."""
    alphabet = byte_alphabet()
    added = tokenizer.get_added_tokens_decoder()
    table = [b""] * (max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id in added:
            table[token_id] = b"" if added[token_id].special else token.encode("utf-8")
        elif all(character in alphabet for character in token):
            table[token_id] = bytes([alphabet[character] for character in token])
        else:
            raise VocabularyError(
                f"{name} is not byte-level BPE: its token {token!r} is not written in the byte alphabet; use "
                "a tokenizer such as GPT-2's, or leave data.tokenizer.path out to train one on the corpus"
            )
    return table


def _only_special_token(json_bytes: bytes, name: str) -> str:
    try:
        added: list[dict[str, Any]] = json.loads(json_bytes)["added_tokens"]
        special = [token["content"] for token in added if token["special"]]
    except (ValueError, LookupError, TypeError) as error:
        raise VocabularyError(f"{name} is not a tokenizer.json: {error}") from error
    if len(special) != 1:
        raise VocabularyError(
            f"{name} has {len(special)} special tokens; set data.tokenizer.end_of_text to one of them"
        )
    return str(special[0])


def _pairs(merges: Iterable[str | list[str]]) -> Iterator[list[str]]:
    """The merges as pairs. Older files write them as one string with a space."""
    for merge in merges:
        yield merge.split(" ") if isinstance(merge, str) else merge


def _probe() -> str:
    """Text with every byte of UTF-8, and with sequences that normalizers and pre-tokenizers often change."""
    two_bytes = "".join(map(chr, range(0x800)))
    longer = "".join(chr(code) for code in range(0x800, 0x110000, 0x400) if not 0xD800 <= code < 0xE000)
    return f"x  y\t z\r\n\r\n    return\u00a0e\u0301 \u212b \ufb01 I'm HE'LL 1234567 {two_bytes}{longer}  "
