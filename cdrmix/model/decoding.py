"""Continues many rows token by token: prefill of prompts of any lengths, repeated states, one token for every row.

A prompt is read once, and any number of rows continue from its state. A row that has ended is taken out of the batch.
The bits of a row do not depend on the other rows on a CPU whose products run on one thread (`runtime.be_deterministic`,
`kernels/common/products.py`).

Shapes: B rows, L tokens of a prompt, D the width of the model, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cdrmix.errors import NonFiniteLogitsError
from cdrmix.model import compiled, graphs
from cdrmix.model.cache import concatenated, select
from cdrmix.model.causal import CausalModel
from cdrmix.runtime import threads_for

PREFILL_TOKENS = 4096  # of prompts that are read in one forward pass
SHORTEST_PIECE = 64  # tokens a row of such a pass, of however many rows
# Multiplications of a product [B, D] x [D, D] up to which one CPU thread computes it, in some 0.2 ms. A second thread
# saves half of that on an idle machine, and on a busy one costs milliseconds.
ONE_THREAD = 1 << 22


class Prefix(NamedTuple):
    """The state after the tokens so far: the logits [B, V] of the next token, and the cache."""

    logits_BV: Tensor
    cache: Any


def check_finite(logits: Tensor) -> None:
    """Raises NonFiniteLogitsError if a row of logits [..., V] has NaN or infinity, or no finite number at all.

    Minus infinity alone is a token that cannot be.
    """
    if not bool(logits.amax(-1).isfinite().all()):  # the largest of NaN and others is NaN
        raise NonFiniteLogitsError(
            "the model gives logits that are NaN or infinite, so no token can be chosen and no text can be scored: its "
            "weights are damaged, or their training diverged; use an earlier checkpoint, or another copy of the model"
        )


def prefill(model: CausalModel, prompts_BL: Tensor, cache: Any = None) -> Prefix:
    """Reads prompts of one length in one pass, from the state `cache` if it is given. The cache is not changed."""
    return _read(model, prompts_BL, cache)


def prefill_rows(model: CausalModel, prompts: Sequence[Sequence[int]]) -> Prefix:
    """Reads prompts of any lengths, none of them empty: short ones together as packed documents, long ones in pieces.

    Pieces bound the memory: only the keys and values of attention grow with the length of a prompt.
    The prompts have one length if the model's `batching` is "length", and there is one if it is "row".
    """
    device = next(model.parameters()).device
    if len({len(ids) for ids in prompts}) == 1:
        ids_BT, cache, prefix = torch.tensor([list(ids) for ids in prompts], device=device), None, None
        for piece_BT in ids_BT.split(max(SHORTEST_PIECE, PREFILL_TOKENS // len(prompts)), dim=1):
            prefix = _read(model, piece_BT, cache, own=cache is not None)
            cache = prefix.cache
        assert prefix is not None
        return prefix
    parts = []
    alone = _is_compiled(model)  # the compiled step reads rows of one length, and short ones in little more time
    for pack in [[ids] for ids in prompts] if alone else _packs(prompts):
        if len(pack) == 1:
            parts.append(prefill_rows(model, pack))
            continue
        bounds = torch.tensor([0, *accumulate(map(len, pack))], dtype=torch.int32, device=device)
        ids_1T = torch.tensor([[token for ids in pack for token in ids]], device=device)
        parts.append(_read(model, ids_1T, None, bounds))
    logits, caches = zip(*parts, strict=True)
    return Prefix(torch.cat(logits), concatenated(*caches))


def repeat(prefix: Prefix, times: int) -> Prefix:
    """Every row `times` times, in neighbouring rows: the start of several continuations of each prompt."""
    return take(prefix, [row for row in range(len(prefix.logits_BV)) for _ in range(times)])


def take(prefix: Prefix, rows: Sequence[int]) -> Prefix:
    """The rows with these numbers, in this order; a row may be repeated or left out."""
    if list(rows) == list(range(len(prefix.logits_BV))):
        return prefix
    chosen = torch.tensor(rows, device=prefix.logits_BV.device, dtype=torch.int64)
    return Prefix(prefix.logits_BV[chosen], select(prefix.cache, chosen))


def advance(model: CausalModel, tokens_B: Tensor, cache: Any, *, own: bool = False) -> Prefix:
    """Reads one token for every row.

    own: nobody else uses `cache`, and the caller will not use it again: the new state may be in its memory.
    """
    return _read(model, tokens_B.unsqueeze(1), cache, own=own)


class Rows:
    """Rows that are continued token by token from a state; a row may be left out after each token.

    tokens: most tokens that are read of a row. own: as in `advance`; without it the state stays as it is. In evaluation
    mode without gradients, as in `evaluating`; the model must not be changed before the last token.
    """

    def __init__(self, model: CausalModel, prefix: Prefix, tokens: int, *, own: bool = False) -> None:
        self._model, self._cache, rows = model, prefix.cache, len(prefix.logits_BV)
        self._decoder: compiled.Decoder | graphs.GraphDecoder | None
        self._decoder = graphs.decoder(model, prefix.cache, rows, tokens)
        if self._decoder is None:
            self._decoder = compiled.decoder(model, prefix.cache, rows, tokens, own=own)

    def read(self, tokens_R: Tensor) -> Tensor:
        """Reads a token of each row; returns the logits [R, V] of the next, which are valid until then."""
        if self._decoder is not None:
            return self._decoder.read(tokens_R)
        logits_RV, self._cache = advance(self._model, tokens_R, self._cache)
        return logits_RV

    def drop(self, ended: Sequence[int], rows: int) -> list[int]:
        """Leaves out the rows with these numbers, ascending, of `rows`. Returns those of the others, in their new
        order."""
        if self._decoder is not None:
            return self._decoder.drop(ended)
        kept = sorted(set(range(rows)).difference(ended))
        self._cache = select(self._cache, torch.tensor(kept, device=next(self._model.parameters()).device))
        return kept


def _packs(prompts: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Groups the prompts in their order, up to PREFILL_TOKENS tokens a group. A longer prompt is a group of its own."""
    packs: list[list[Sequence[int]]] = []
    left = 0
    for ids in prompts:
        if not packs or len(ids) > left:
            packs.append([])
            left = PREFILL_TOKENS
        packs[-1].append(ids)
        left -= len(ids)
    return packs


def _is_compiled(model: CausalModel) -> bool:
    with evaluating(model):
        return compiled.serves(model)


def _read(
    model: CausalModel, ids_BT: Tensor, cache: Any, cu_seqlens: Tensor | None = None, *, own: bool = False
) -> Prefix:
    """The state after the last token of each row, or of each packed document. own: as in `advance`."""
    # Not around a generator of tokens: an abandoned generator would leave these contexts at exit.
    if cu_seqlens is None:
        with evaluating(model):
            read = compiled.read(model, ids_BT, cache, own=own)
        if read is not None:
            assert read.logits_BV is not None
            return Prefix(read.logits_BV, read.cache)
    with evaluating(model), few_threads(model, ids_BT.numel()):
        output = model(ids_BT, cache=cache, return_cache=True, cu_seqlens=cu_seqlens)
        hidden = output.hidden_BTD
        last = hidden[:, -1] if cu_seqlens is None else hidden.flatten(0, 1)[cu_seqlens[1:].long() - 1]
        return Prefix(model.logits(last), output.cache)


@contextmanager
def evaluating(model: CausalModel) -> Iterator[None]:
    """Without gradients, in evaluation mode (no router jitter, no expert capacity)."""
    training = isinstance(model, nn.Module) and model.training
    if training:
        model.eval()  # type: ignore[attr-defined]  # an nn.Module
    try:
        with torch.no_grad():
            yield
    finally:
        if training:
            model.train()  # type: ignore[attr-defined]


@contextmanager
def few_threads(model: CausalModel, tokens: int) -> Iterator[None]:
    """Within it, one CPU thread for products of so few tokens that a second one saves little (ONE_THREAD).

    Measured on two busy cores: a token of 32 rows of core-tiny takes 25 ms with one thread and 770 ms with two.
    """
    width = next(model.parameters()).shape[-1]  # of the embedding
    with threads_for(1 if tokens * width * width <= ONE_THREAD else tokens):
        yield
