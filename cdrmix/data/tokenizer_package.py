"""Opens a tokenizer.json, which may come from elsewhere, with the package tokenizers, so that it can do no harm.

The file says what is done with every text. Steps that make a text far longer would take all memory, and a large id the
memory of a table, so both are refused when it is opened. What the package cannot do it says by a Rust panic or a plain
Exception.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer

from cdrmix.errors import VocabularyError
from cdrmix.json_text import parse_json

LONGER = 16  # how many times as long the steps of a tokenizer may make a text; usual ones replace a space by one sign
MOST_IDS = 2**24  # as model.vocab_size
REMEDY = "it is damaged, or not made for a model; take the tokenizer of the model from its publisher again"


def open_tokenizer(json_bytes: bytes, name: str) -> Tokenizer:
    """The tokenizer of the package, which encodes whole texts and does not pad. name: of the file, for messages.

    Raises VocabularyError.
    """
    with failures(name):
        try:
            tokenizer = Tokenizer.from_buffer(json_bytes)
            content = parse_json(json_bytes)
        except ValueError as error:
            raise VocabularyError(f"{name} is not a tokenizer.json that can be read: {error}") from error
        for key in ("normalizer", "decoder"):
            if _growth(content.get(key)) > LONGER:
                raise VocabularyError(
                    f"{name}: its {key} may make a text more than {LONGER} times as long (Replace, Prepend); {REMEDY}"
                )
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= MOST_IDS:
        raise VocabularyError(f"{name} has a token with the id {largest:,}; allowed are less than {MOST_IDS:,}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def failures(name: str = "the tokenizer") -> Iterator[None]:
    """Raises what the package says by a plain Exception or a panic as VocabularyError."""
    try:
        yield
    except BaseException as error:
        # The class of panics, which is no Exception, cannot be imported.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        said = str(error).partition("\n")[0]
        raise VocabularyError(f"{name} cannot be used: the package tokenizers says {said!r}; {REMEDY}") from error


def _growth(step: Any) -> int:
    """How many times as long the steps in a part of the file make a text, at most."""
    if isinstance(step, list):
        return math.prod(map(_growth, step))
    if not isinstance(step, dict):
        return 1
    kind, pattern = step.get("type"), step.get("pattern")
    if kind == "Replace":  # a regular expression may match each character
        size = len(pattern["String"]) if isinstance(pattern, dict) and "String" in pattern else 1
        return -(-len(str(step.get("content", ""))) // max(size, 1)) or 1
    if kind == "Prepend":
        return len(str(step.get("prepend", ""))) or 1
    return math.prod(_growth(inner) for inner in step.values() if isinstance(inner, list))
