"""The tokenizer: byte-level BPE over UTF-8, trained on the corpus, or loaded from the tokenizer.json of a model.

The `tokenizers` package trains and encodes; batch_encoder.py encodes large batches faster, with the same ids. This
module guarantees that no text is encoded to the end-of-text id and, for a lossless tokenizer, that decoding encoded
text gives its exact bytes. A tokenizer of another kind (NFC, spaces as `▁` with byte fallback, Unigram, WordPiece)
changes some texts. It is accepted with `lossless=False`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from cdrmix.data import batch_encoder, token_bytes, tokenizer_files
from cdrmix.data.batch_encoder import BatchEncoder, Ids, ReferenceEncoder, pretokenizer_pattern
from cdrmix.data.tokenizer_package import failures, open_tokenizer
from cdrmix.errors import VocabularyError
from cdrmix.json_text import parse_json

PIECE_CHARACTERS = 2**20  # longer texts are encoded in pieces, which bounds memory and uses all cores
GROUP_CHARACTERS = 2**22  # encoded by one call
# Texts with fewer characters are encoded before an encoder is made, which takes as long as encoding 0.1 to 1 MB.
FEW_CHARACTERS = 2**16
# Characters of a word in training, of punctuation in a row and of white space. Longer ones are cut: the training takes
# time quadratic in the length of a word, and a token of that length has no use. No word of a language is longer.
LONGEST_WORD = 512


class TextTokenizer:
    """Encodes text to ids and decodes ids. `train` and `load` make one. json_bytes: the contents of its tokenizer.json.

    Attributes:
        vocab_size: the largest id plus 1.
        fingerprint: SHA-256 of `json_bytes`, hexadecimal.
        end_of_text, end_of_text_id: the token at the end of a document.
        begin_of_text: the token at the beginning of a document; None: the end-of-text token of the document before.
        first_id: the id before the first token of a text, in training and in prompts: of begin_of_text or end_of_text.
        lossless: whether decoding encoded text gives its exact bytes. So the bytes of ids are those of the text.
    """

    def __init__(
        self,
        json_bytes: bytes,
        end_of_text: str,
        *,
        begin_of_text: str | None = None,
        lossless: bool = True,
        name: str = "tokenizer.json",
    ) -> None:
        """lossless: raise VocabularyError for a tokenizer that changes text. name: of the file, for messages."""
        self.json_bytes = json_bytes
        self.fingerprint = hashlib.sha256(json_bytes).hexdigest()
        self.end_of_text = end_of_text
        self._tokenizer = _open(json_bytes, name)
        content = parse_json(json_bytes)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {number: token.content for number, token in added.items() if token.special}
        end_of_text_id = self._tokenizer.token_to_id(end_of_text)
        if end_of_text_id is None:
            raise VocabularyError(
                f"{name} has no token {end_of_text!r}; set data.tokenizer.end_of_text to one of its special tokens: "
                f"{tokenizer_files.some([*special.values()]) or '(it has none)'}"
            )
        self.end_of_text_id: int = end_of_text_id
        steps = tokenizer_files.decoder_types(content)
        self._byte_level = lossless or steps == ["ByteLevel"]
        # The special ids that no text may have. The others are not needed: a lossless tokenizer is checked instead.
        self._guarded = frozenset[int]() if lossless else self._special_ids(content["model"], special, name)
        self._spellings: dict[int, list[int]] = {}
        self._bytes_of_id = self._make_table(steps, name, strict=lossless)
        self._bytes_of_id[end_of_text_id] = b""
        self.vocab_size = len(self._bytes_of_id)
        self.lossless = self._check_text(content["model"], name, lossless)
        _check_ids(self._tokenizer, content, name)
        self.begin_of_text = None if begin_of_text == end_of_text else begin_of_text
        self.first_id = end_of_text_id if self.begin_of_text is None else self._begin_id(self.begin_of_text, name)

    @classmethod
    def load(
        cls,
        path: str | Path,
        end_of_text: str | None = None,
        *,
        begin_of_text: str | None = "auto",
        lossless: bool = True,
        added_tokens: Sequence[str] = (),
    ) -> TextTokenizer:
        """Loads a tokenizer.json, or that of a folder of a model.

        end_of_text: the name of its end-of-text token; None: the eos_token of the folder, or its only special token.
        begin_of_text: the name of the token before a document. auto: the one that the tokenizer adds, if it adds one;
            None: the end-of-text token. lossless: refuse a tokenizer that changes text. added_tokens: special tokens
            to add to the vocabulary.
        Raises ConfigError if the file does not exist, VocabularyError if it is no tokenizer of the kind.
        """
        files = tokenizer_files.read_files(Path(path))
        end_of_text = end_of_text or tokenizer_files.end_of_text(files)
        if begin_of_text == "auto":
            begin_of_text = tokenizer_files.begin_of_text(files)
        json_bytes = files.json_bytes
        if added_tokens:
            tokenizer = _open(json_bytes, files.name)
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in added_tokens])
            json_bytes = tokenizer.to_str(pretty=True).encode("utf-8")
        return cls(json_bytes, end_of_text, begin_of_text=begin_of_text, lossless=lossless, name=files.name)

    @classmethod
    def load_stored(
        cls, path: Path, end_of_text: str | None, begin_of_text: str | None = "auto", *, lossless: bool = True
    ) -> TextTokenizer:
        """Loads the tokenizer.json of shards, a run or an export; the other arguments are those of the configuration.

        The file of `settings` is next to a tokenizer for which they do not suffice. Without it, documents begin with
        end-of-text, unless begin_of_text is a name.
        """
        begin_of_text = None if begin_of_text == "auto" else begin_of_text
        settings = path.with_name(tokenizer_files.STORED)
        if settings.is_file():
            end_of_text, begin_of_text = tokenizer_files.stored(settings)
        return cls.load(path, end_of_text, begin_of_text=begin_of_text, lossless=lossless)

    def settings(self, end_of_text: str | None) -> bytes | None:
        """The contents of the file with the tokens of this tokenizer, or None if `load_stored` does not need it.

        end_of_text: that of the configuration.
        """
        if end_of_text is not None and self.begin_of_text is None:
            return None
        settings = {"end_of_text": self.end_of_text, "begin_of_text": self.begin_of_text}
        return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode("utf-8")

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        *,
        vocab_size: int,
        end_of_text: str,
        special_tokens: Sequence[str] = (),
        min_frequency: int = 1,
        max_token_length: int | None = None,
        nfkc: bool = False,
    ) -> TextTokenizer:
        """Trains a tokenizer with at most `vocab_size` ids; fewer if the text has no more pairs to merge.

        special_tokens: in addition to `end_of_text`, such as the marks of data.objectives.fim.
        min_frequency: occurrences of a pair that is merged. max_token_length: bound in bytes; None: none.
        nfkc: bring texts into the Unicode normal form NFKC. Then the tokenizer is not lossless.
        Words, and runs of punctuation or white space, are cut after LONGEST_WORD characters here, not when encoding.
        The result depends only on the texts and their order, not on the number of threads.
        """
        tokenizer = Tokenizer(models.BPE())
        if nfkc:
            tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = _splitting(LONGEST_WORD)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[
                AddedToken(token, special=True, normalized=False) for token in (end_of_text, *special_tokens)
            ],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
            min_frequency=min_frequency,
            max_token_length=max_token_length,
        )
        tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
        tokenizer.pre_tokenizer = _splitting()
        json_bytes = tokenizer.to_str(pretty=True).encode("utf-8")
        return cls(json_bytes, end_of_text, lossless=not nfkc, name="the trained tokenizer")

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without an end-of-text id."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str], continues: Sequence[bool] | None = None) -> list[Ids]:
        """uint32 ids of each text, encoded on all cores.

        continues: whether each text continues another one; None: none does. A tokenizer that puts a space before a
        text does not put it before one that continues another.
        """
        encoded: list[list[Ids]] = [[] for _ in texts]
        for group in _groups(texts):
            for tokenizer, some in self._by_tokenizer(group, continues):
                results = self._encoder_of(tokenizer, some).encode([text for _, _, text in some])
                for (index, _, _), ids in zip(some, results, strict=True):
                    encoded[index].append(self._respelled(ids)[0])
        return [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in encoded]

    def encode_with_bytes(self, texts: Sequence[str], continues: Sequence[bool] | None = None) -> list[tuple[Ids, Ids]]:
        """Ids of each text and the UTF-8 bytes of the text that each id stands for, both uint32 [tokens].

        continues: as of `encode_batch`.
        Bytes at the end of a text that no id stands for (white space that is dropped) are not counted.
        """
        ids: list[list[Ids]] = [[] for _ in texts]
        origins: list[list[Ids]] = [[] for _ in texts]  # of each id of the result: its number before respelling
        ends: list[list[int]] = [[] for _ in texts]  # of each id before respelling: in characters of the text
        for group in _groups(texts):
            for tokenizer, some in self._by_tokenizer(group, continues):
                with failures():
                    results = tokenizer.encode_batch([text for _, _, text in some], add_special_tokens=False)
                for (index, start, _), result in zip(some, results, strict=True):
                    respelled, origin = self._respelled(np.array(result.ids, np.uint32))
                    origin = np.arange(len(respelled), dtype=np.uint32) if origin is None else origin
                    ids[index].append(respelled)
                    origins[index].append(origin + np.uint32(len(ends[index])))
                    ends[index] += [start + end for _, end in result.offsets]
        encoded = []
        for text, of_ids, of_origins, of_ends in zip(texts, ids, origins, ends, strict=True):
            origin = np.concatenate(of_origins)
            counts = token_bytes.text_bytes_of_tokens(text, of_ends)[origin]
            counts[1:][origin[1:] == origin[:-1]] = 0
            encoded.append((np.concatenate(of_ids), counts))
        return encoded

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of a text from its ids. Special and unused ids have none."""
        if not self._byte_level:
            with failures():
                return self._tokenizer.decode([*ids], skip_special_tokens=True).encode("utf-8")
        return b"".join(map(self.token_bytes, ids))

    def token_bytes(self, token: int, *, begins: bool = False) -> bytes:
        """The bytes of an id. begins: of the first one of a text, before which some tokenizers remove a space."""
        if token >= len(self._bytes_of_id):
            return b""
        within = self._bytes_of_id[token]
        if begins and not self._byte_level and within.startswith(b" "):
            with failures():
                alone = self._tokenizer.decode([token]).encode("utf-8")
            return alone if within == b" " + alone else within
        return within

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids. Bytes that are not UTF-8 (ids cut within a character) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_with_special_tokens(self, ids: Iterable[int]) -> str:
        """The text of the ids, with the names of special tokens."""
        parts = [self.token_bytes(token) or (self._tokenizer.id_to_token(token) or "").encode("utf-8") for token in ids]
        return b"".join(parts).decode("utf-8", errors="replace")

    def special_id(self, token: str) -> int:
        """The id of a special token. Raises VocabularyError if there is none, or if text can be encoded to it."""
        added = self._tokenizer.get_added_tokens_decoder()
        special = {entry.content: number for number, entry in added.items() if entry.special}
        if token not in special:
            raise VocabularyError(
                f"the tokenizer has no special token {token!r}; its special tokens are "
                f"{', '.join(map(repr, special)) or '(none)'}. Add it with data.tokenizer.add_tokens, name one of them "
                f"where the configuration asks for {token!r}, or leave data.tokenizer.path out to train a tokenizer "
                "that has it"
            )
        if special[token] in self.encode(f"{token} {token}"):
            raise VocabularyError(f"the tokenizer merges ordinary text into {token!r}; name another special token")
        return special[token]

    def byte_lengths(self) -> list[int]:
        """The number of bytes of each id, as it is decoded."""
        return [len(token) for token in self._bytes_of_id]

    def _special_ids(self, model: dict[str, Any], special: dict[int, str], name: str) -> frozenset[int]:
        """The ids of special tokens, without that of unknown characters."""
        unknown = model.get("unk_token", model.get("unk_id"))
        if unknown in (self.end_of_text_id, self.end_of_text) and not self._byte_level:
            raise VocabularyError(
                f"{name} encodes unknown characters to its end-of-text token {self.end_of_text!r}, so text could end "
                "documents; set data.tokenizer.end_of_text to another special token"
            )
        kept = {number for number, token in special.items() if unknown not in (number, token)}
        return frozenset(kept | {self.end_of_text_id})

    def _make_table(self, steps: list[str], name: str, *, strict: bool) -> list[bytes]:
        """The bytes of each id. steps: the types of the steps of the decoder."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        added = {number: token.special for number, token in self._tokenizer.get_added_tokens_decoder().items()}
        if self._byte_level:
            return token_bytes.byte_level(vocabulary, added, name, strict=strict)

        def decode_batch(rows: list[list[int]]) -> list[str]:
            return self._tokenizer.decode_batch(rows, skip_special_tokens=False)

        with failures(name):
            context = self._tokenizer.encode("a", add_special_tokens=False).ids
            return token_bytes.decoded(vocabulary, added, decode_batch, context[-1] if context else 0, steps)

    def _check_text(self, model: dict[str, Any], name: str, lossless: bool) -> bool:
        """Whether the tokenizer is lossless. Refuses one that is not, if asked, and one that encodes text to the
        end-of-text id."""
        spelled = lossless and any("".join(pair) == self.end_of_text for pair in _pairs(model.get("merges", [])))
        added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        probe = f"{_probe()}{''.join(map(_probe_of, added))}{self.end_of_text} {self.end_of_text}"
        ids = self.encode(probe)
        if spelled or self.end_of_text_id in ids:
            raise VocabularyError(
                f"{name} merges ordinary text into its end-of-text token {self.end_of_text!r}, so text could end "
                "documents; set data.tokenizer.end_of_text to another special token"
            )
        same = self._byte_level and self.decode_bytes(ids) == probe.encode("utf-8") and not model.get("dropout")
        if lossless and not same:
            for token in added:
                if self.decode(self.encode(_probe_of(token))) != _probe_of(token):
                    raise VocabularyError(
                        f"{name} does not give text back unchanged: its added token {token!r} takes the white space "
                        "beside it (lstrip, rstrip) or changes the text around it; set both to false in the file, make "
                        "the token special, or accept a tokenizer that changes text by data.tokenizer.lossless: false"
                    )
            raise VocabularyError(
                f"{name} does not give text back unchanged; data.tokenizer.path takes byte-level BPE without "
                "normalizer, prefix space or dropout (such as GPT-2's), or leave it out to train one on the corpus; "
                "data.tokenizer.lossless: false accepts a tokenizer that changes text"
            )
        if model.get("dropout"):
            raise VocabularyError(
                f"{name} has model.dropout={model['dropout']}, so it encodes a text differently each time; set it to "
                "null in the file"
            )
        return same

    def _begin_id(self, token: str, name: str) -> int:
        number = self._tokenizer.token_to_id(token)
        if number is None:
            raise VocabularyError(
                f"{name} has no token {token!r} to begin a document; set data.tokenizer.begin_of_text to one of its "
                "special tokens, or to null to begin documents with the end-of-text token"
            )
        if number in self.encode(f"{token} {token}"):
            raise VocabularyError(
                f"{name} encodes ordinary text to {token!r}, so text could begin documents; set "
                "data.tokenizer.begin_of_text to a special token"
            )
        return number

    @cached_property
    def _continuing(self) -> Tokenizer:
        """The tokenizer for a text that continues another one."""
        json_bytes = tokenizer_files.continuing(self.json_bytes)
        return self._tokenizer if json_bytes is None else _open(json_bytes, "tokenizer.json")

    @cached_property
    def encoder(self) -> BatchEncoder:
        """What encodes batches of texts that do not continue others."""
        return batch_encoder.make_encoder(self._tokenizer, self.json_bytes)

    def _encoder_of(self, tokenizer: Tokenizer, group: list[tuple[int, int, str]]) -> BatchEncoder:
        few = "encoder" not in self.__dict__ and sum(len(text) for _, _, text in group) < FEW_CHARACTERS
        return ReferenceEncoder(tokenizer) if few or tokenizer is not self._tokenizer else self.encoder

    def _by_tokenizer(
        self, group: list[tuple[int, int, str]], continues: Sequence[bool] | None = None
    ) -> Iterator[tuple[Tokenizer, list[tuple[int, int, str]]]]:
        """The pieces that begin a text, then those that continue one, each with its tokenizer.

        group: (number of the text, position in it, piece).
        """
        goes_on = [start > 0 or (continues is not None and continues[index]) for index, start, _ in group]
        if not any(goes_on) or self._continuing is self._tokenizer:
            yield self._tokenizer, group
        else:
            yield self._tokenizer, [piece for piece, later in zip(group, goes_on, strict=True) if not later]
            yield self._continuing, [piece for piece, later in zip(group, goes_on, strict=True) if later]

    def _respelled(self, ids: Ids) -> tuple[Ids, Ids | None]:
        """Ids of a text without special tokens, and for each id its number in `ids`; None: nothing changes.

        Unigram encodes text that equals the name of a special token to that token. Here it is encoded in two parts.
        """
        guarded = self._guarded.intersection(ids.tolist()) if self._guarded else None
        if not guarded:
            return ids, None
        parts = [self._spelling(number) if number in guarded else [number] for number in ids.tolist()]
        origin = np.repeat(np.arange(len(ids), dtype=np.uint32), [len(part) for part in parts])
        return np.array([number for part in parts for number in part], np.uint32), origin

    def _spelling(self, token: int) -> list[int]:
        """Ids of the name of a special token as ordinary text; the token itself if it cannot be spelled."""
        if token not in self._spellings:
            name = self._tokenizer.id_to_token(token) or ""
            for cut in range(1, len(name)):
                with failures():
                    halves = self._continuing.encode_batch_fast([name[:cut], name[cut:]], add_special_tokens=False)
                ids = [number for half in halves for number in half.ids]
                if ids and not self._guarded.intersection(ids):
                    break
            else:
                ids = [token]
            self._spellings[token] = ids
        return self._spellings[token]


def _splitting(most: int | None = None) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of tokenizers that are trained here. most: characters of a word; None: any number."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pretokenizer_pattern(most)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def pieces(text: str) -> Iterator[str]:
    """`text` in pieces of at most PIECE_CHARACTERS, cut after line ends if possible."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = text.rfind("\n", start, start + PIECE_CHARACTERS) + 1 or start + PIECE_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]


def _groups(texts: Sequence[str]) -> Iterator[list[tuple[int, int, str]]]:
    """The pieces of all texts as (number of the text, position in it, piece), in lists of about GROUP_CHARACTERS."""
    group: list[tuple[int, int, str]] = []
    characters = 0
    for index, text in enumerate(texts):
        start = 0
        for piece in pieces(text):
            group.append((index, start, piece))
            start += len(piece)
            characters += len(piece)
            if characters >= GROUP_CHARACTERS:
                yield group
                group, characters = [], 0
    if group:
        yield group


def _open(json_bytes: bytes, name: str) -> Tokenizer:
    """The tokenizer of the package. Raises VocabularyError."""
    tokenizer = open_tokenizer(json_bytes, name)
    # Otherwise text that equals the name of a special token would become that token.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _check_ids(tokenizer: Tokenizer, content: dict[str, Any], name: str) -> None:
    """Raises VocabularyError if the package gives tokens other ids than the file."""
    for token in content.get("added_tokens", []):
        found = tokenizer.token_to_id(token["content"])
        if found != token["id"]:
            raise VocabularyError(
                f"{name} gives its token {token['content']!r} the id {token['id']}, but the tokenizers package reads "
                f"it as {found}, because the ids of added tokens follow the number of tokens in model.vocab; change "
                "model.vocab so that they agree"
            )


def _pairs(merges: Iterable[str | list[str]]) -> Iterator[list[str]]:
    """The merges as pairs. Older files write them as one string with a space."""
    for merge in merges:
        yield merge.split(" ") if isinstance(merge, str) else merge


def _probe_of(token: str) -> str:
    """Text with an added token between spaces, letters, digits, punctuation and line ends."""
    return (
        "".join(f"{side}{token}{side}" for side in ("  ", "a", "\n", " \n\n ", "\t", "1", "!", "é", "_", "\r\n"))
        + token
    )


def _probe() -> str:
    """Text with every byte of UTF-8, and with sequences that normalizers and pre-tokenizers often change."""
    two_bytes = "".join(map(chr, range(0x800)))
    longer = "".join(chr(code) for code in range(0x800, 0x110000, 0x400) if not 0xD800 <= code < 0xE000)
    return f"x  y\t z\r\n\r\n    return\u00a0e\u0301 \u212b \ufb01 I'm HE'LL 1234567 {two_bytes}{longer}  "
