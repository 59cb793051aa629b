"""Self-speculative decoding: the further depths of a model draft tokens, and one pass of the model verifies them.

A pass reads the last token of a row and the drafts after it, token by token in one forward pass
(`LanguageModel.forward`, token_by_token), and gives the logits after each. A token is drawn from the first logits as in
plain decoding. While it equals the draft, the next one is drawn from the next logits. The cache after the last token
that was right is kept; later caches are dropped. So recurrent states, convolutions, token shifts, keys and values are
rolled back by choosing one of the states, never by inverting a recurrence.

The text is that of plain decoding: each token is drawn once, from logits of the same tokens, with the same number of
the row's generator. On a CPU with the settings of `runtime.work_alone` the logits have the same bits as in plain
decoding, while a pass has so few tokens that the products of its rows round alike: 4, measured. The products of the
experts of Routing-Mamba are an exception: they round otherwise for one row of an expert than for several.
On a GPU products of several rows are rounded otherwise than those of one row, so that a token can differ where two are
nearly equally likely.

Drafts are the most likely tokens of the depths. A drawn token is accepted with the probability that it equals the
draft, as by the rule of speculative sampling (arXiv 2302.01318) for a draft that is certain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cdrmix import ops
from cdrmix.errors import ConfigError
from cdrmix.inference.generate import Row
from cdrmix.inference.sampling import draw
from cdrmix.model.block import BlockCache
from cdrmix.model.cache import rewind
from cdrmix.model.causal import CausalModel
from cdrmix.model.decoding import PREFILL_TOKENS, evaluating, few_threads
from cdrmix.model.language_model import Cache, LanguageModel


@dataclass
class DraftStatistics:
    """Counts of a generation. passes: forward passes, that of each prompt too. tokens: drawn tokens. drafted, accepted:
    tokens that were drafted, and those of them that were also drawn."""

    passes: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        """The share of the drafts that were accepted; 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens for each forward pass; 1 in plain decoding."""
        return self.tokens / self.passes if self.passes else 0.0

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens in {self.passes} passes ({self.tokens_per_pass:.2f} each); {self.accepted} of "
            f"{self.drafted} drafts accepted ({self.acceptance:.0%})"
        )


def drafting_model(model: CausalModel) -> LanguageModel:
    """The model, which can draft. Raises ConfigError if it cannot."""
    if not isinstance(model, LanguageModel) or model.prediction is None or not model.prediction.drafts:
        raise ConfigError(
            "speculative decoding needs a model with the further depths of model.prediction, of another kind than "
            "shared; an export has them with export.prediction_heads: keep"
        )
    if model.adapters:
        raise ConfigError("speculative decoding is not for models with plastic adapters: leave it out")
    if model.config.depth is not None and model.config.depth.part != "feed_forward":
        raise ConfigError(
            "speculative decoding is not for models whose mixers skip tokens (model.depth.part): leave it out"
        )
    return model


def decode_speculatively(
    model: CausalModel, rows: Sequence[Row], vocabulary: int | None, statistics: DraftStatistics
) -> Iterator[tuple[int, int]]:
    """Yields what `generate.decode` yields for each row, in another order: one row after another.

    statistics: the counts are added to it. Raises ConfigError immediately if the model cannot draft.
    """
    drafting = drafting_model(model)
    return (pair for number, row in enumerate(rows) for pair in _decode(drafting, number, row, vocabulary, statistics))


def _decode(
    model: LanguageModel, number: int, row: Row, vocabulary: int | None, statistics: DraftStatistics
) -> Iterator[tuple[int, int]]:
    drafter = Drafter(model, vocabulary)
    cache, hidden_1TD = _prefill(model, row.ids, keeps_all=drafter.reads_all)
    with evaluating(model), few_threads(model, 1):
        logits_TV = model.logits(hidden_1TD[0, -1:])
    states: tuple[Cache, ...] = (cache,)
    drafts: list[int] = []
    statistics.passes += 1
    while True:
        for place in range(len(drafts) + 1):  # the places of the pass whose tokens before are all right
            (token,) = draw(logits_TV[place : place + 1, :vocabulary], [row])
            row.ids.append(token)
            row.drawn += 1
            statistics.tokens += 1
            right = place < len(drafts) and token == drafts[place]
            statistics.accepted += right
            yield number, token
            if row.ended or row.drawn == row.sampling.max_new_tokens:
                return
            if not right:
                break
        rewind(states[place])
        read_1TD = hidden_1TD[:, : hidden_1TD.shape[1] - len(drafts) + place]  # the prompt, or what was right
        most = row.sampling.max_new_tokens - row.drawn - 1  # the pass gives a token after the last draft too
        with evaluating(model), few_threads(model, model.config.prediction.tokens):  # type: ignore[union-attr]
            drafts = drafter.draft(read_1TD, row.ids)[:most]
            ids_1T = torch.tensor([[token, *drafts]], device=hidden_1TD.device)
            output = model(ids_1T, cache=states[place], token_by_token=True)
            hidden_1TD, logits_TV = output.hidden_BTD, model.logits(output.hidden_BTD[0])
        assert output.caches is not None
        states = output.caches
        statistics.passes += 1
        statistics.drafted += len(drafts)


def _prefill(model: LanguageModel, ids: Sequence[int], *, keeps_all: bool) -> tuple[Cache, Tensor]:
    """The cache after the ids, and their hidden states [1, T, D], or that of the last one only."""
    ids_1T = torch.tensor([list(ids)], device=model.embedding.weight.device)
    cache: Cache | None = None
    parts: list[Tensor] = []
    for piece_1T in ids_1T.split(PREFILL_TOKENS, dim=1):
        with evaluating(model), few_threads(model, piece_1T.numel()):
            output = model(piece_1T, cache=cache, return_cache=True)
        cache = output.cache
        parts = [*parts, output.hidden_BTD] if keeps_all else [output.hidden_BTD[:, -1:]]
    assert cache is not None
    return cache, torch.cat(parts, 1)


class Drafter:
    """Drafts tokens of one row with the further depths of a model: the most likely one of each.

    Depths of kind sequential mix tokens, so they have caches. A depth's cache is that of the tokens for which all that
    it reads is drawn; what it computes from drafts is dropped.
    """

    def __init__(self, model: LanguageModel, vocabulary: int | None) -> None:
        assert model.prediction is not None
        self._model, self._prediction, self._vocabulary = model, model.prediction, vocabulary
        self.reads_all = self._prediction.section.kind == "sequential"  # the hidden state of each token, in order
        self._read = 0  # tokens whose hidden states were given
        self._caches: list[BlockCache | None] = [None] * len(self._prediction.depths)
        self._ends = [0] * len(self._prediction.depths)  # of each depth's cache, in tokens
        self._kept: list[Tensor | None] = [None] * len(self._prediction.depths)  # inputs of a depth after its cache

    def draft(self, hidden_1TD: Tensor, ids: Sequence[int]) -> list[int]:
        """The tokens after `ids`, by the hidden states of the tokens since the last call, all but the last of ids."""
        if self.reads_all:
            return self._of_blocks(hidden_1TD, ids)
        drafts: list[int] = []
        state, token = hidden_1TD[:, -1], ids[-1]
        heads = self._prediction.heads()
        for number, depth in enumerate(self._prediction.depths):
            vector = self._embed([token])[:, 0] if self._prediction.reads_tokens else None
            state, head_input = depth(state, vector)
            token = self._most_likely(head_input, None if heads is None else heads[number])
            drafts.append(token)
        return drafts

    def _of_blocks(self, hidden_1TD: Tensor, ids: Sequence[int]) -> list[int]:
        known = [*ids]  # and the drafts
        inputs_1TD, start = hidden_1TD, self._read  # of this depth: its tokens from `start` on
        self._read += hidden_1TD.shape[1]
        settled = self._read  # of the inputs: those before it are not computed from drafts
        for number, depth in enumerate(self._prediction.depths):
            shift, begin = number + 1, self._ends[number]
            kept = self._kept[number]
            if kept is not None:
                inputs_1TD = torch.cat([kept, inputs_1TD], 1)
                start -= kept.shape[1]
            assert start == begin, "a depth reads every token once"
            vectors_1TD = self._embed(known[begin + shift : self._read + shift])
            end = max(begin, len(ids) - shift)  # the tokens for which the token that the depth reads is drawn
            state, final, cache = [], end - begin, self._caches[number]
            if final:
                made, head_input, cache = self._run(
                    depth, inputs_1TD[:, :final], vectors_1TD[:, :final], begin, cache, True
                )
                state.append(made)
            if end < self._read:
                made, head_input, _ = self._run(depth, inputs_1TD[:, final:], vectors_1TD[:, final:], end, cache, False)
                state.append(made)
            # The depth before computes its outputs from `settled` on again in the next call.
            self._caches[number], self._ends[number] = cache, end
            self._kept[number] = inputs_1TD[:, final : settled - begin]
            known.append(self._most_likely(head_input[:, -1], None))
            inputs_1TD, start, settled = torch.cat(state, 1), begin, end
        return known[len(ids) :]

    def _run(
        self, depth: torch.nn.Module, inputs: Tensor, vectors: Tensor, past: int, cache: BlockCache | None, keep: bool
    ) -> tuple[Tensor, Tensor, BlockCache | None]:
        ids = torch.zeros(inputs.shape[:2], dtype=torch.int64, device=inputs.device)
        context = self._prediction.context(ids, None, inputs, past, keep_cache=keep)
        made: tuple[Tensor, Tensor, BlockCache | None] = depth(inputs, vectors, context, cache)
        return made

    def _embed(self, ids: Sequence[int]) -> Tensor:
        return self._model.embedding(torch.tensor([list(ids)], device=self._model.embedding.weight.device))

    def _most_likely(self, head_input_1D: Tensor, head_VD: Tensor | None) -> int:
        logits_1V = self._model.logits(head_input_1D) if head_VD is None else ops.linear(head_input_1D, head_VD)
        return int(logits_1V[0, : self._vocabulary].argmax())
