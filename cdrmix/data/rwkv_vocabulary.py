"""Converts a vocabulary of RWKV World models (rwkv_vocab_v20230424.txt) to a tokenizer.json of the same ids.

A line of the file is `id literal length`: a token as a Python string or bytes literal, and its length in bytes. The
tokenizer takes the longest token that the rest of the text begins with, over bytes. BPE, WordPiece and Unigram of the
package tokenizers do not do so. But a regular expression does: that of the prefix tree of all tokens, in which a
longer token is tried before a shorter one. It cuts a text into tokens, and the model of the tokenizer.json looks up
their ids. So shards, runs, exports and transformers read it like any other tokenizer.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from cdrmix.data.token_bytes import byte_alphabet
from cdrmix.errors import VocabularyError

END_OF_TEXT = "<|rwkv_tokenizer_end_of_text|>"  # of id 0, which the file leaves out; the name in conversions for others
LARGEST_ID = 1 << 20  # far more than a vocabulary has
LONGEST = 512  # bytes of a token; the expression is nested as deep. Those of the public vocabulary have 128 at most
_LINE = re.compile(r"(\d{1,9}) (b?(?:'.*'|\".*\")) (\d{1,9})")
_META = frozenset(r"\^$.|?*+()[]{}-&~#")  # characters that mean something in a regular expression, or in its sets

Tree = dict[str, Any]  # of prefixes: character to subtree; the key "" where a token ends


class _Branch(NamedTuple):
    """An alternative. letters: those that it can begin with. text: its expression. tokens: how many end in it."""

    letters: list[str]
    text: str
    tokens: int


def is_vocabulary(content: bytes) -> bool:
    """Whether a file is such a vocabulary, by its first line."""
    first = content.lstrip()[:1024].split(b"\n")[0].rstrip(b"\r")
    return _LINE.fullmatch(first.decode("utf-8", errors="replace")) is not None


def tokenizer_json(content: bytes, name: str) -> bytes:
    """The bytes of the tokenizer.json of a vocabulary. name: of the file, for messages.

    The ids are those of the file, and 0 is the end of a text. The result depends on the tokens and their ids only.
    Raises VocabularyError if a line is malformed, a token or id occurs twice, or a single byte has no token.
    """
    tokens = dict(sorted(_tokens(content, name)))
    missing = sorted({bytes([byte]) for byte in range(256)} - {*tokens.values()})
    if missing:
        raise VocabularyError(
            f"{name} has no token for {len(missing)} of the 256 bytes, the first is 0x{missing[0].hex()}, so some "
            "texts have no ids; use the complete file"
        )
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    words = {number: "".join(letters[byte] for byte in token) for number, token in tokens.items()}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    described = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 0, "content": END_OF_TEXT, **special}],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
                {"type": "Split", "pattern": {"Regex": _pattern(words)}, "behavior": "Isolated", "invert": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        # The expression gives no piece that is not a token, so there are no unknown ones.
        "model": {
            "type": "WordLevel",
            "vocab": {END_OF_TEXT: 0} | {word: number for number, word in words.items()},
            "unk_token": END_OF_TEXT,
        },
    }
    return json.dumps(described, ensure_ascii=False).encode("utf-8")


def _tokens(content: bytes, name: str) -> Iterator[tuple[int, bytes]]:
    """The ids and bytes of a vocabulary."""
    try:
        lines = content.decode("utf-8").split("\n")  # not splitlines: a literal may have U+2028
    except UnicodeDecodeError as error:
        raise VocabularyError(f"{name} is not UTF-8 text: {error}") from error
    ids: dict[bytes, int] = {}
    used: set[int] = {0}
    for place, line in enumerate(lines, 1):
        if not line.strip():
            continue
        number, token = _parsed(line.rstrip("\r"), f"{name}:{place}")
        if number in used or token in ids:
            what = f"the token {token!r}" if token in ids else f"the id {number}"
            raise VocabularyError(f"{name}:{place}: {what} is not the first one; ids are from 1 on, 0 ends a text")
        used.add(number)
        ids[token] = number
        yield number, token


def _parsed(line: str, where: str) -> tuple[int, bytes]:
    found = _LINE.fullmatch(line)
    try:
        literal = ast.literal_eval(found[2]) if found else None  # of a string or of bytes: nothing is run
    except (SyntaxError, ValueError):
        literal = None
    token = literal.encode("utf-8", "surrogatepass") if isinstance(literal, str) else literal
    if found is None or not isinstance(token, bytes) or not token:
        raise VocabularyError(f"{where}: found {line[:80]!r}; allowed: an id, a Python literal and its length in bytes")
    if len(token) != int(found[3]):
        raise VocabularyError(f"{where}: the token {token!r} has {len(token)} bytes; the line says {found[3]}")
    if int(found[1]) > LARGEST_ID or len(token) > LONGEST:
        raise VocabularyError(
            f"{where}: found the id {found[1]} and {len(token)} bytes; allowed: at most {LARGEST_ID} and {LONGEST}"
        )
    return int(found[1]), token


def _pattern(words: dict[int, str]) -> str:
    """A regular expression that matches the longest of these words at every position."""
    root: Tree = {}
    for word in words.values():
        tree = root
        for letter in word:
            tree = tree.setdefault(letter, {})
        tree[""] = {}
    return _expression(root)


def _expression(tree: Tree) -> str:
    """What follows a prefix: alternatives with different first letters; optional, and tried first, where a token
    ends."""
    branches = []
    last = [letter for letter, inner in tree.items() if letter and inner.keys() == {""}]
    if last:
        branches.append(_Branch(last, _quoted(last[0]) if len(last) == 1 else _set(last), len(last)))
    for letter, inner in tree.items():
        if letter and letter not in last:
            branches.append(_Branch([letter], _quoted(letter) + _expression(inner), _tokens_in(inner)))
    if not branches:
        return ""
    text = _alternatives(sorted(branches, key=lambda branch: (-branch.tokens, branch.letters)))
    if "" in tree:
        return f"(?:{text})?"
    return text if len(branches) == 1 else f"(?:{text})"


def _alternatives(branches: list[_Branch]) -> str:
    """Alternatives, of which the matcher tries one after another. So a set of letters tells at once whether one of the
    first can match, and they have half of the tokens: 1.1 to 1.8 times as fast as alternatives alone."""
    if len(branches) <= 2:
        return "|".join(branch.text for branch in branches)
    half, first, cut = sum(branch.tokens for branch in branches) / 2, 0, 0
    while first < half and cut < len(branches) - 1:
        first, cut = first + branches[cut].tokens, cut + 1
    letters = [letter for branch in branches[:cut] for letter in branch.letters]
    rest = _alternatives(branches[cut:])
    if cut == 1:
        return f"{branches[0].text}|{rest}"
    return f"(?={_set(letters)})(?:{_alternatives(branches[:cut])})|{rest}"


def _tokens_in(tree: Tree) -> int:
    return sum(_tokens_in(inner) if letter else 1 for letter, inner in tree.items())


def _set(letters: list[str]) -> str:
    return f"[{''.join(map(_quoted, letters))}]"


def _quoted(letter: str) -> str:
    return f"\\{letter}" if letter in _META else letter
