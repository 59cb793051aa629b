"""Generates text token by token. Each token costs one forward pass of one token with the cache of the tokens before it.

The cache of RWKV-7 and Mamba-2 blocks has a constant size. Attention blocks keep their keys and values. Prompts of
different lengths are continued in one batch. They are read as packed documents. A long prompt is read in pieces, so
that only the keys and values of attention grow with its length.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError
from cdrmix.inference.sampling import Sampling, draw
from cdrmix.model.causal import CausalModel
from cdrmix.model.decoding import Prefix, advance, few_threads, prefill_rows, take

# A model, rows and the vocabulary -> (number of the row, token id): `decode`, or speculative decoding.
Decoding = Callable[[CausalModel, Sequence["Row"], int | None], Iterator[tuple[int, int]]]
ROWS_AT_ONCE = 128  # core-tiny: 18 times the tokens a second of one row; 13 times at 32 rows


@dataclass
class Row:
    """One sequence to continue.

    ids: token ids, not empty; each sampled token is appended. first: if not empty, the first sampled token is one of
    these. added: number of ids at the beginning that are not of the prompt, such as the token that begins a document.
    ended: the reader of the tokens sets it to stop the sampling. drawn: number of sampled tokens.
    """

    ids: list[int]
    sampling: Sampling
    first: Sequence[int] = ()
    added: int = 0
    ended: bool = False
    drawn: int = 0
    random: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.sampling.seed)


def decode(
    model: CausalModel, rows: Sequence[Row], vocabulary: int | None = None, *, rows_at_once: int = ROWS_AT_ONCE
) -> Iterator[tuple[int, int]]:
    """Yields (number of the row, token id) until each row has ended or has max_new_tokens.

    vocabulary: only ids below it are sampled; a tokenizer may have fewer ids than the model.
    rows_at_once: rows in one batch; further rows follow when all of these have ended.

    Equal prompts in a batch are read once. A row that has ended leaves its batch.
    The tokens of a row depend on its ids and its sampling. On a CPU with the settings of `runtime.work_alone` they do
    not depend on the other rows. On a GPU they depend on them through the rounding of products. The model says which
    rows it reads together.
    """
    for start in range(0, len(rows), rows_at_once):
        yield from _decode(model, rows, range(len(rows))[start : start + rows_at_once], vocabulary)


def _decode(
    model: CausalModel, rows: Sequence[Row], chosen: Sequence[int], vocabulary: int | None
) -> Iterator[tuple[int, int]]:
    together: dict[int, list[int]] = {}
    for number in chosen:
        group = {"any": 0, "length": len(rows[number].ids), "row": number}[model.batching]
        together.setdefault(group, []).append(number)
    batches = [(numbers, _begun(model, [rows[number].ids for number in numbers])) for numbers in together.values()]
    while batches:
        going_on = []
        for numbers, prefix in batches:
            with few_threads(model, len(numbers)):
                tokens = draw(prefix.logits_BV[:, :vocabulary], [rows[number] for number in numbers])
            for number, token in zip(numbers, tokens, strict=True):
                rows[number].ids.append(token)
                rows[number].drawn += 1
                yield number, token
            kept = [
                index
                for index, number in enumerate(numbers)
                if not rows[number].ended and rows[number].drawn < rows[number].sampling.max_new_tokens
            ]
            if not kept:
                continue
            cache = take(prefix, kept).cache
            numbers = [numbers[index] for index in kept]
            last_B = torch.tensor([rows[number].ids[-1] for number in numbers], device=prefix.logits_BV.device)
            going_on.append((numbers, advance(model, last_B, cache, own=True)))
        batches = going_on


def _begun(model: CausalModel, prompts: Sequence[list[int]]) -> Prefix:
    """The state after the prompts. Equal prompts are read once."""
    numbers: dict[tuple[int, ...], int] = {}
    places = [numbers.setdefault(tuple(ids), len(numbers)) for ids in prompts]
    return take(prefill_rows(model, list(numbers)), places)


class TextStream:
    """Decodes the tokens of one row to text: complete characters, up to a stop string.

    The bytes of an incomplete character are held back until it is complete. Bytes that are not UTF-8 become U+FFFD.
    Text that may be the beginning of a stop string is held back until this is certain.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stopped = False
        self._stop = stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, spelled: bytes, *, last: bool = False) -> str:
        """Returns the text that is certain after these bytes. last: no bytes follow."""
        if self.stopped:
            return ""
        text = self._held + self._decoder.decode(spelled, final=last)
        # The match that ends first; of several, the longest. So the boundaries of tokens do not matter.
        ends = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        held = 0 if last else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of the text that is a prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def generate(
    model: CausalModel,
    tokenizer: TextTokenizer,
    prompts: Sequence[str],
    samplings: Sequence[Sampling],
    *,
    heal: bool = False,
    decoding: Decoding | None = None,
) -> Iterator[tuple[int, str]]:
    """Yields (number of the prompt, piece of text) while the continuations are generated.

    A prompt begins a document: the first id of the tokenizer comes before it, as in training. It may be empty. Its
    continuation ends at the end-of-text token, before a stop string, or after max_new_tokens. The same model, prompts
    and samplings give the same text. Raises ConfigError immediately for a prompt that is not Unicode text.
    heal: the first sampled token may also be one that begins with the last token of the prompt, instead of it. In
    training `):` and the indentation after it are often one token, so a model hardly expects a line break after `):`.
    decoding: None: `decode`.
    """
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise ConfigError(f"a prompt must be a string; found {prompt!r}")
        # Python represents bytes that are not UTF-8 by surrogates.
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise ConfigError("a prompt must be UTF-8 text; this prompt has bytes that are not UTF-8")
    return _generate(model, tokenizer, prompts, samplings, heal, decode if decoding is None else decoding)


def _generate(
    model: CausalModel,
    tokenizer: TextTokenizer,
    prompts: Sequence[str],
    samplings: Sequence[Sampling],
    heal: bool,
    decoding: Decoding,
) -> Iterator[tuple[int, str]]:
    rows, streams, known = [], [], []  # known: first bytes that the prompt has too
    spelled_by_id: list[bytes] = []  # computed once, if needed
    beginning: dict[bytes, list[int]] = {}  # tokens that begin with some bytes
    for prompt, sampling in zip(prompts, samplings, strict=True):
        # Tokens of words include the space before the word. A separate space token hardly occurs in training. So a
        # space at the end of the prompt is removed, and the first sampled token must begin with a space.
        space = prompt.endswith(" ") and bool(prompt.strip())
        ids = [tokenizer.first_id, *tokenizer.encode(prompt[:-1] if space else prompt)]
        prefix = b" " if space else b""
        if heal and not space and len(ids) > 2:
            prefix = tokenizer.token_bytes(ids.pop())
        if prefix and prefix not in beginning:
            spelled_by_id = spelled_by_id or [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
            beginning[prefix] = [token for token, each in enumerate(spelled_by_id) if each.startswith(prefix)]
        rows.append(Row(ids, sampling, beginning.get(prefix, ()), added=1))
        streams.append(TextStream(sampling.stop))
        known.append(prefix)
    begun = [bool(prompt) for prompt in prompts]  # whether the text has begun
    for number, token in decoding(model, rows, tokenizer.vocab_size):
        row, stream = rows[number], streams[number]
        row.ended = token == tokenizer.end_of_text_id
        spelled = b"" if row.ended else tokenizer.token_bytes(token, begins=not begun[number])
        begun[number] = begun[number] or tokenizer.token_bytes(token) != b""
        if row.drawn == 1:
            spelled = spelled.removeprefix(known[number])  # a tokenizer may have no token that begins with a space
        piece = stream.push(spelled, last=row.ended or row.drawn == row.sampling.max_new_tokens)
        row.ended = row.ended or stream.stopped
        if piece:
            yield number, piece
