"""Text from a model, token by token: each costs one forward pass of one token on the cache of what came before.

That cache has a constant size in the RWKV-7 and Mamba-2 blocks; the attention blocks keep their keys and values.
Several prompts of any lengths are continued in one batch. They are read packed, one behind another; a long one is read
in pieces, so that memory does not grow with it but for attention's keys and values.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError
from cdrmix.inference.sampling import Sampling, draw
from cdrmix.model.cache import concatenated, select
from cdrmix.model.language_model import Cache, LanguageModel
from cdrmix.runtime import threads_for

PREFILL_TOKENS = 4096  # of prompts that are read in one forward pass
SHORTEST_PIECE = 64  # tokens a row of such a pass, of however many rows


@dataclass
class Row:
    """One sequence that is continued.

    ids: token ids, not empty; those that are drawn are appended. first: the first one drawn is one of these, if any.
    ended: whoever reads the tokens sets it, and no more are drawn.
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
        """The next token id, appended to `ids`."""
        if self.first:
            kept = torch.full_like(logits_V, float("-inf"))
            kept[list(self.first)] = logits_V[list(self.first)]
            logits_V, self.first = kept, ()
        token = draw(logits_V, self.sampling, self.random, self.ids)
        self.ids.append(token)
        self.drawn += 1
        return token


def decode(model: LanguageModel, rows: Sequence[Row], vocabulary: int | None = None) -> Iterator[tuple[int, int]]:
    """Yields (row, token id), row by number, until each has ended or has its max_new_tokens.

    vocabulary: only ids below it are drawn; a tokenizer may have fewer than the model.

    What a row draws depends on its ids and its sampling, and on the other rows only by rounding: on a CPU products of
    one to three rows, of one expert or of a step, round otherwise than those of more. Rows of a model with plastic
    adapters, which count chunks of tokens, are one batch for each length.
    """
    device = next(model.parameters()).device
    together: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        together.setdefault(len(row.ids) if model.adapters else 0, []).append(number)
    batches = [(numbers, *_prefill(model, [rows[number].ids for number in numbers])) for numbers in together.values()]
    while batches:
        going_on = []
        for numbers, hidden_BD, cache in batches:
            with torch.no_grad():
                logits_BV = model.logits(hidden_BD)[:, :vocabulary]
            for number, logits_V in zip(numbers, logits_BV, strict=True):
                yield number, rows[number].draw(logits_V)
            kept = [
                place
                for place, number in enumerate(numbers)
                if not rows[number].ended and rows[number].drawn < rows[number].sampling.max_new_tokens
            ]
            if not kept:
                continue
            if len(kept) < len(numbers):
                cache = select(cache, torch.tensor(kept, device=device))
                numbers = [numbers[place] for place in kept]
            last_B1 = torch.tensor([rows[number].ids[-1:] for number in numbers], device=device)
            going_on.append((numbers, *_forward(model, last_B1, cache)))
        batches = going_on


def _prefill(model: LanguageModel, prompts: Sequence[list[int]]) -> tuple[Tensor, Cache]:
    """The hidden states [B, D] of the prompts' last tokens, and the cache behind them."""
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
    """The prompts in their order, as many together as have PREFILL_TOKENS; a longer one is alone."""
    packs: list[list[list[int]]] = []
    left = 0
    for ids in prompts:
        if not packs or len(ids) > left:
            packs.append([])
            left = PREFILL_TOKENS
        packs[-1].append(ids)
        left -= len(ids)
    return packs


def _forward(
    model: LanguageModel, ids_BT: Tensor, cache: Cache | None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Cache]:
    """The hidden states [B, D] of each row's last token, of packed rows of each document's, and the cache after it."""
    # Here, and not around the generator: one that is abandoned would leave these at exit.
    with torch.no_grad(), threads_for(ids_BT.numel()):
        output = model(ids_BT, cache=cache, return_cache=True, cu_seqlens=cu_seqlens)
        hidden = output.hidden_BTD
        return hidden[:, -1] if cu_seqlens is None else hidden.flatten(0, 1)[cu_seqlens[1:].long() - 1], output.cache


class TextStream:
    """The text of one row as its tokens come: whole characters, up to a stop string.

    Bytes of a character that spans tokens are held back until it is complete; bytes that are not UTF-8 become U+FFFD.
    Text that may be the beginning of a stop string is held back until it is told apart.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stopped = False
        self._stop = stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, spelled: bytes, *, last: bool = False) -> str:
        """The text that is certain after these bytes. last: nothing comes after them."""
        if self.stopped:
            return ""
        text = self._held + self._decoder.decode(spelled, final=last)
        # The match that ends first, and of those the longest: so it does not matter where tokens are cut.
        ends = [(place + len(stop), place) for stop in self._stop if (place := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        held = 0 if last else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def generate(
    model: LanguageModel, tokenizer: TextTokenizer, prompts: Sequence[str], samplings: Sequence[Sampling]
) -> Iterator[tuple[int, str]]:
    """Yields (prompt, piece): the continuations of the prompts, by number, piece by piece as they are drawn.

    A prompt begins a document, after an end-of-text, as in training; it may be empty. Its continuation ends at the
    end-of-text token, before a stop string, or at max_new_tokens. The same model, prompts and samplings give the same
    text. Raises ConfigError, at once, for a prompt that is not Unicode text.
    """
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise ConfigError(f"a prompt must be a string; found {prompt!r}")
        if any("\ud800" <= character <= "\udfff" for character in prompt):  # how Python hands on other bytes than UTF-8
            raise ConfigError("a prompt must be UTF-8 text; this one has bytes that are not")
    return _generate(model, tokenizer, prompts, samplings)


def _generate(
    model: LanguageModel, tokenizer: TextTokenizer, prompts: Sequence[str], samplings: Sequence[Sampling]
) -> Iterator[tuple[int, str]]:
    rows, streams, spaces = [], [], []
    spaced: list[int] = []  # tokens that begin with a space; made once
    for prompt, sampling in zip(prompts, samplings, strict=True):
        # Words carry the space before them: after a lone space token the model has seen next to nothing. So a last
        # space is left to the first token drawn, which must begin with it.
        space = prompt.endswith(" ") and bool(prompt.strip())
        ids = [tokenizer.end_of_text_id, *tokenizer.encode(prompt[:-1] if space else prompt)]
        if space and not spaced:
            every = range(tokenizer.vocab_size)
            spaced = [token for token in every if tokenizer.decode_bytes([token])[:1] == b" "]
        rows.append(Row(ids, sampling, spaced if space else ()))
        streams.append(TextStream(sampling.stop))
        spaces.append(space)
    for number, token in decode(model, rows, tokenizer.vocab_size):
        row, stream = rows[number], streams[number]
        row.ended = token == tokenizer.end_of_text_id
        spelled = b"" if row.ended else tokenizer.decode_bytes([token])
        if spaces[number] and row.drawn == 1:
            spelled = spelled[1:]
        piece = stream.push(spelled, last=row.ended or row.drawn == row.sampling.max_new_tokens)
        row.ended = row.ended or stream.stopped
        if piece:
            yield number, piece
