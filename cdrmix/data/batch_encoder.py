"""Encodes batches of texts: with fastokens where its ids are those of the tokenizers package, otherwise with that.

Both read the same tokenizer.json. fastokens takes a part of the formats only, and its ids are compared with those of
`tokenizers` once a process and file. So the ids of a text do not depend on which of the two encodes it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from cdrmix.data.token_bytes import byte_alphabet
from cdrmix.data.tokenizer_package import failures
from cdrmix.json_text import parse_json

Ids = np.ndarray[Any, np.dtype[np.uint32]]


# Pre-tokenisation of tokenizers that are trained here: BPE tokens never cross these cuts. The alternatives are a word
# with one preceding character (" word", ".name", "(self"); up to three digits; punctuation with the following line end
# and indentation (":\n        "); white space over line ends with the next indentation; white space. Bytes per held-out
# token on the Python 3.11 standard library with a vocabulary of 4,096: 3.71. The GPT-2 pattern has 3.45. A pattern that
# separates line ends and indentation, like that of GPT-4, has 3.46.
def pretokenizer_pattern(most: int | None = None) -> str:
    """The pattern; with runs of at most `most` characters for the training, which otherwise takes quadratic time."""
    many, any_number = ("+", "*") if most is None else (f"{{1,{most}}}", f"{{0,{most}}}")
    return (
        rf"[^\r\n\p{{L}}\p{{M}}\p{{N}}]?[\p{{L}}\p{{M}}]{many}"
        r"|\p{N}{1,3}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]{many}(?:\s{any_number}\n\s{any_number})?"
        rf"|\s{any_number}\n\s{any_number}"
        rf"|\s{many}"
    )


PRETOKENIZER_PATTERN = pretokenizer_pattern()

# The patterns of pre-tokenisation for which tests/data/test_batch_encoder.py compares the ids of both packages over
# all code points and hostile texts. The step ByteLevel with use_regex means GPT-2's.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_NUMBERS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
PATTERNS = {
    "cdrmix": PRETOKENIZER_PATTERN,
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": _WORDS_AND_NUMBERS % "{1,3}" + r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": _WORDS_AND_NUMBERS % "" + r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}


# Characters of the longest token with which fastokens is used: it reads the file in time quadratic in that length.
LONGEST_TOKEN = 4096


class BatchEncoder(Protocol):
    """Encodes texts. description: the package and its version, and why it is not fastokens."""

    @property
    def description(self) -> str: ...

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """uint32 ids of each text, without special tokens, on the threads of the package."""


class ReferenceEncoder:
    """Encodes with the tokenizers package."""

    def __init__(self, tokenizer: Tokenizer, reason: str = "") -> None:
        """reason: why fastokens is not used."""
        self._tokenizer = tokenizer
        self._reason = reason

    @property
    def description(self) -> str:
        return f"tokenizers {version('tokenizers')}" + (f" ({self._reason})" if self._reason else "")

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        # The results of the package take about 100 bytes per token, so the caller passes about 4 MB of text.
        with failures():
            results = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(result.ids, np.uint32) for result in results]


class FastEncoder:
    """Encodes with fastokens.

    Its threads do not survive a fork, so a forked process encodes with the reference, as it does where fastokens gives
    up on a text (PCRE2 limits the steps of a match).
    """

    def __init__(self, content: dict[str, Any], reference: ReferenceEncoder) -> None:
        """content: of a tokenizer.json for which `unsupported` finds nothing. Raises ImportError, ValueError."""
        import fastokens

        # Added tokens are special, and text is not encoded to special tokens: so they are left out, as are the steps
        # that follow the model.
        content = {**content, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        self._tokenizer = fastokens.Tokenizer.from_json_str(json.dumps(content, ensure_ascii=False))
        self._reference = reference
        self._process = os.getpid()

    @property
    def description(self) -> str:
        return f"fastokens {version('fastokens')}"

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        if os.getpid() != self._process:
            return self._reference.encode(texts)
        try:
            ids, offsets = self._tokenizer.encode_batch_flat([*texts])
        except UnicodeEncodeError:  # a lone surrogate is the caller's mistake
            raise
        except ValueError:
            return self._reference.encode(texts)
        bounds = np.frombuffer(offsets, "<u8")[1:-1].astype(np.int64)
        return np.split(np.frombuffer(ids, "<u4").astype(np.uint32), bounds) if texts else []


_agree: set[bytes] = set()  # SHA-256 of each tokenizer.json for which both gave the same ids: the check takes 0.1 s


def make_encoder(tokenizer: Tokenizer, json_bytes: bytes) -> BatchEncoder:
    """The encoder for a tokenizer.json: fastokens if it is installed, supports the file and gives the same ids.

    tokenizer: the file as the tokenizers package reads it, with encode_special_tokens.
    """
    content = parse_json(json_bytes)
    reason = unsupported(content)
    if reason is not None:
        return ReferenceEncoder(tokenizer, reason)
    reference = ReferenceEncoder(tokenizer)
    try:
        encoder = FastEncoder(content, reference)
    except ImportError:
        return ReferenceEncoder(tokenizer, "fastokens is not installed")
    except ValueError as error:
        return ReferenceEncoder(tokenizer, f"fastokens cannot read tokenizer.json: {error}")
    digest = hashlib.sha256(json_bytes).digest()
    if digest not in _agree:
        sample = hostile_sample([token["content"] for token in content.get("added_tokens", [])])
        for ours, expected in zip(encoder.encode(sample), reference.encode(sample), strict=True):
            if not np.array_equal(ours, expected):
                reason = f"{encoder.description} gives other ids for the text of the self-check"
                return ReferenceEncoder(tokenizer, reason)
        _agree.add(digest)
    return encoder


def unsupported(content: dict[str, Any]) -> str | None:
    """Why fastokens is not used for the contents of a tokenizer.json, or None if it is."""
    model = content["model"]
    if model.get("type", "BPE") != "BPE":
        return f"the model is {model['type']}, not BPE"
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            return f"the model has {key}"
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if len({*merges}) < len(merges):
        return "the model lists a merge twice"
    if (longest := max(map(len, model["vocab"]), default=0)) > LONGEST_TOKEN:
        return f"the vocabulary has a token of {longest:,} bytes"
    if not byte_alphabet().keys() <= model["vocab"].keys():
        return "the vocabulary lacks some bytes"
    if content.get("normalizer") is not None:
        return f"the file has the normalizer {content['normalizer'].get('type')}"
    if not all(token["special"] for token in content.get("added_tokens", [])):
        return "the file has added tokens that are not special"
    return _unsupported_split(content.get("pre_tokenizer"))


def _unsupported_split(step: dict[str, Any] | None) -> str | None:
    """The same for the pre-tokenizer: ByteLevel, or Split with one of PATTERNS and ByteLevel."""
    steps = [] if step is None else step["pretokenizers"] if step["type"] == "Sequence" else [step]
    if not steps or steps[-1]["type"] != "ByteLevel" or len(steps) > 2:
        return "the pre-tokenizer is none of those that are compared"
    if steps[-1].get("add_prefix_space", True):
        return "the pre-tokenizer adds a space before a text"
    if steps[-1].get("use_regex", True) != (len(steps) == 1):
        return "the pre-tokenizer splits never or twice"
    if len(steps) == 1:
        return None
    split = steps[0]
    if split["type"] != "Split" or split["behavior"] != "Isolated" or split["invert"]:
        return "the pre-tokenizer is none of those that are compared"
    if split["pattern"].get("Regex") not in PATTERNS.values():
        return "the pattern of the pre-tokenizer is none of those that are compared"
    return None


def hostile_sample(names: Sequence[str]) -> list[str]:
    """Texts for the self-check: each kind of character, with neighbours that change how it is split.

    names: of special tokens, which stay text. The last text is long enough for the package to divide it over threads.
    """
    characters = ["'", "'s", "'LL", "\u017f", " ", "   ", "\t", "\n", "\r\n", "\0", "\x1c", "\x85", "\u00a0", "\u2028"]
    characters += ["\u3000", "a", "Z", "\u00e9", "e\u0301", "\u0130", "\u01c5", "\u02b0", "\u0915\u094d", "\u6771"]
    characters += ["7", "12345", "\u0662", "\u00b2", "\u2167", "_", "-", "...", "//", "\u200d", "\ufeff", "\U0001f642"]
    characters += ["\U0001f468\u200d\U0001f469", "\U0001d7d8", "\ufffd", "\U0010ffff", *names[:100]]
    pairs = [first + second for first in characters for second in characters]
    return ["", *characters, "|".join(pairs), "".join(pairs), "x" * 1000, " " * 1000 + "y", "a b\n\n  c" * 10_000]
