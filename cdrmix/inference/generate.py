"""Generates text token by token. Each token costs one forward pass of one token with the cache of the tokens before it.

The cache of RWKV-7 and Mamba-2 blocks has a constant size. Attention blocks keep their keys and values. Prompts of
different lengths are continued in one batch. They are read as packed documents. A long prompt is read in pieces, so
that only the keys and values of attention grow with its length.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError
from cdrmix.inference.sampling import Sampling, draw
from cdrmix.model.cache import concatenated, select
from cdrmix.model.causal import CausalModel
from cdrmix.runtime import threads_for

PREFILL_TOKENS = 4096  # of prompts that are read in one forward pass
SHORTEST_PIECE = 64  # tokens a row of such a pass, of however many rows


@dataclass
class Row:
    """One sequence to continue.

    ids: token ids, not empty; each sampled token is appended. first: if not empty, the first sampled token is one of
    these. ended: the reader of the tokens sets it to stop the sampling. drawn: number of sampled tokens.
    """

    ids: list[int]
    sampling: Sampling
    first: Sequence[int] = ()
    ended: bool = False
    drawn: int = 0
    random: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.sampling.seed)

    def draw(self, logits_V: Tensor) -> int:
        """Samples the next token id and appends it to `ids`."""
        if self.first:
            kept = torch.full_like(logits_V, float("-inf"))
            kept[list(self.first)] = logits_V[list(self.first)]
            logits_V, self.first = kept, ()
        token = draw(logits_V, self.sampling, self.random, self.ids)
        self.ids.append(token)
        self.drawn += 1
        return token


def decode(model: CausalModel, rows: Sequence[Row], vocabulary: int | None = None) -> Iterator[tuple[int, int]]:
    """Yields (number of the row, token id) until each row has ended or has max_new_tokens.

    vocabulary: only ids below it are sampled; a tokenizer may have fewer ids than the model.

    The tokens of a row depend on its ids and its sampling. They depend on the other rows only through rounding: on a
    CPU, matrix products of one to three rows round differently from those of more. The model says which rows it reads
    together.
    """
    device = next(model.parameters()).device
    together: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        together.setdefault({"any": 0, "length": len(row.ids), "row": number}[model.batching], []).append(number)
    batches = [(numbers, *_prefill(model, [rows[number].ids for number in numbers])) for numbers in together.values()]
    while batches:
        going_on = []
        for numbers, hidden_BD, cache in batches:
            with torch.no_grad():
                logits_BV = model.logits(hidden_BD)[:, :vocabulary]
            for number, logits_V in zip(numbers, logits_BV, strict=True):
                yield number, rows[number].draw(logits_V)
            kept = [
                index
                for index, number in enumerate(numbers)
                if not rows[number].ended and rows[number].drawn < rows[number].sampling.max_new_tokens
            ]
            if not kept:
                continue
            if len(kept) < len(numbers):
                cache = select(cache, torch.tensor(kept, device=device))
                numbers = [numbers[index] for index in kept]
            last_B1 = torch.tensor([rows[number].ids[-1:] for number in numbers], device=device)
            going_on.append((numbers, *_forward(model, last_B1, cache)))
        batches = going_on


def _prefill(model: CausalModel, prompts: Sequence[list[int]]) -> tuple[Tensor, Any]:
    """The hidden states [B, D] of the last tokens of the prompts, and the cache after them."""
    device = next(model.parameters()).device
    if len({len(ids) for ids in prompts}) == 1:
        ids_BT, cache = torch.tensor(prompts, device=device), None
        for piece_BT in ids_BT.split(max(SHORTEST_PIECE, PREFILL_TOKENS // len(prompts)), dim=1):
            hidden_BD, cache = _forward(model, piece_BT, cache)
        assert cache is not None
        return hidden_BD, cache
    parts = []
    for pack in _packs(prompts):
        if len(pack) == 1:
            parts.append(_prefill(model, pack))
            continue
        bounds = torch.tensor([0, *accumulate(map(len, pack))], dtype=torch.int32, device=device)
        ids_1T = torch.tensor([[token for ids in pack for token in ids]], device=device)
        parts.append(_forward(model, ids_1T, None, bounds))
    hidden, caches = zip(*parts, strict=True)
    return torch.cat(hidden), concatenated(*caches)


def _packs(prompts: Sequence[list[int]]) -> list[list[list[int]]]:
    """Groups the prompts in their order, up to PREFILL_TOKENS tokens a group. A longer prompt is a group of its own."""
    packs: list[list[list[int]]] = []
    left = 0
    for ids in prompts:
        if not packs or len(ids) > left:
            packs.append([])
            left = PREFILL_TOKENS
        packs[-1].append(ids)
        left -= len(ids)
    return packs


def _forward(model: CausalModel, ids_BT: Tensor, cache: Any, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Any]:
    """The hidden states [B, D] of the last token of each row, or of each packed document, and the cache after it."""
    # Not around the generator: an abandoned generator would leave these contexts at exit.
    with torch.no_grad(), threads_for(ids_BT.numel()):
        output = model(ids_BT, cache=cache, return_cache=True, cu_seqlens=cu_seqlens)
        hidden = output.hidden_BTD
        return hidden[:, -1] if cu_seqlens is None else hidden.flatten(0, 1)[cu_seqlens[1:].long() - 1], output.cache


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
    model: CausalModel, tokenizer: TextTokenizer, prompts: Sequence[str], samplings: Sequence[Sampling]
) -> Iterator[tuple[int, str]]:
    """Yields (number of the prompt, piece of text) while the continuations are generated.

    A prompt begins a document: the first id of the tokenizer comes before it, as in training. It may be empty. Its
    continuation ends at the end-of-text token, before a stop string, or after max_new_tokens. The same model, prompts
    and samplings give the same text. Raises ConfigError immediately for a prompt that is not Unicode text.
    """
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise ConfigError(f"a prompt must be a string; found {prompt!r}")
        # Python represents bytes that are not UTF-8 by surrogates.
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise ConfigError("a prompt must be UTF-8 text; this prompt has bytes that are not UTF-8")
    return _generate(model, tokenizer, prompts, samplings)


def _generate(
    model: CausalModel, tokenizer: TextTokenizer, prompts: Sequence[str], samplings: Sequence[Sampling]
) -> Iterator[tuple[int, str]]:
    rows, streams, spaces = [], [], []
    spaced: list[int] = []  # tokens that begin with a space, computed once
    for prompt, sampling in zip(prompts, samplings, strict=True):
        # Tokens of words include the space before the word. A separate space token hardly occurs in training. So a
        # space at the end of the prompt is removed, and the first sampled token must begin with a space.
        space = prompt.endswith(" ") and bool(prompt.strip())
        ids = [tokenizer.first_id, *tokenizer.encode(prompt[:-1] if space else prompt)]
        if space and not spaced:
            every = range(tokenizer.vocab_size)
            spaced = [token for token in every if tokenizer.token_bytes(token)[:1] == b" "]
        rows.append(Row(ids, sampling, spaced if space else ()))
        streams.append(TextStream(sampling.stop))
        spaces.append(space)
    begun = [bool(prompt) for prompt in prompts]  # whether the text has begun
    for number, token in decode(model, rows, tokenizer.vocab_size):
        row, stream = rows[number], streams[number]
        row.ended = token == tokenizer.end_of_text_id
        spelled = b"" if row.ended else tokenizer.token_bytes(token, begins=not begun[number])
        begun[number] = begun[number] or tokenizer.token_bytes(token) != b""
        if spaces[number] and row.drawn == 1:
            spelled = spelled.removeprefix(b" ")  # a tokenizer may have no token that begins with a space
        piece = stream.push(spelled, last=row.ended or row.drawn == row.sampling.max_new_tokens)
        row.ended = row.ended or stream.stopped
        if piece:
            yield number, piece
