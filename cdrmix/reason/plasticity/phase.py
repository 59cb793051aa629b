"""Phase B1: plastic adapters learn their updates by next-token cross-entropy on answers that need them.

A row is the chunks of an episode and then its question as a probe. The loss is on the answers alone, and its gradient
goes through every update between a fact and its answer. With `carry: fast` the states of the mixers are reset at each
chunk, so only the fast weights pass from chunk to chunk; with `carry: all` the states pass too. With `train: all` the
phase trains whole small models from scratch, with or without adapters, for the ablations.

`read` reads chunk by chunk in memory that does not grow with the number of chunks; `answers` answers from its caches.

Shapes: B episodes, N chunks, C tokens of a chunk, P tokens of a probe, T = N C + P.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cdrmix.config.schema import Config
from cdrmix.config.schema_reasoning import Reasoning
from cdrmix.data.tasks import IGNORED
from cdrmix.model.cache import plastic_only, select, with_fast_weights
from cdrmix.model.fast_weights import FastWeightOptions
from cdrmix.model.language_model import Cache, LanguageModel
from cdrmix.reason.episodes import Episodes, EpisodeSource, TextEpisodes, by_length, chunk_counts
from cdrmix.reason.model import Loss, StageBModel
from cdrmix.reason.phase import PHASES, Sources, generator_of, reasoning_of
from cdrmix.training.objective import Outcome

EVALUATION_ROWS = 64  # episodes in one forward pass


class Row(NamedTuple):
    """Episodes as sequences: ids and targets, int64 [B, T] (IGNORED except at answers). cu_seqlens, episodes: int32,
    the borders over the flattened tokens at which mixers and fast weights are reset; None: at rows alone."""

    ids_BT: Tensor
    targets_BT: Tensor
    cu_seqlens: Tensor | None
    episodes: Tensor | None


def rows_of(source: EpisodeSource, episodes: Episodes, carry: str, device: torch.device) -> Row:
    """A row for every episode: its chunks, then its probe."""
    chunks_BNC, probe = episodes.chunks_BNC, source.probe(episodes)
    batch, number, chunk = chunks_BNC.shape
    ids = torch.cat([chunks_BNC.flatten(1), probe.ids_BT], 1)
    targets = torch.cat([torch.full((batch, number * chunk), IGNORED), probe.targets_BT], 1)
    ids, targets = ids.to(device), targets.to(device)
    if carry == "all":
        return Row(ids, targets, None, None)
    length = ids.shape[1]
    rows = torch.arange(batch) * length
    starts = (rows[:, None] + torch.arange(number + 1) * chunk).flatten()
    end = torch.tensor([batch * length])
    cu_seqlens, borders = torch.cat([starts, end]), torch.cat([rows, end])
    return Row(ids, targets, cu_seqlens.int().to(device), borders.int().to(device))


class PlasticityPhase:
    """Phase B1; see the module."""

    name = "plasticity"
    rolls_out = False
    passes_vary = False
    measures = ("loss", "correct", "answers", "episodes", "correlation")

    def __init__(self, config: Config, source: EpisodeSource) -> None:
        assert config.reasoning is not None
        self._reasoning: Reasoning = config.reasoning
        self._section = config.reasoning.phases.plasticity
        self._model = config.cdrmix_model
        self._source = source
        self._seed = config.run.seed

    def trains(self, parameter: str) -> bool:
        """The adapters, or with `train: all` the language model."""
        if self._section.train == "all":
            return parameter.startswith("language_model.")
        return parameter.startswith("language_model.") and ".plastic." in parameter

    def chunks(self, step: int) -> int:
        """The number of chunks of a step's episodes, uniform from 2 (or as many as hold the facts) to the configured;
        always the configured for documents that have lengths of their own.

        During the first `growth_steps` steps the upper end grows from the lower one.
        """
        most = self._reasoning.plasticity.chunks
        if self._source.own_lengths:
            return most
        least = min(most, max(2, self._source.least_chunks))
        if step < self._section.growth_steps:
            most = least + (most - least) * step // self._section.growth_steps
        generator = generator_of(self._seed, f"{self.name} chunks", step)
        return least + int(torch.randint(most - least + 1, (), generator=generator))

    def losses(self, model: StageBModel, step: int, rank: int, processes: int) -> list[Loss]:
        """The micro-batches of this process."""
        episodes, micro = self._section.episodes, self._section.micro_batch
        numbers = range(step * episodes, (step + 1) * episodes)[rank::processes]
        device = next(model.parameters()).device
        losses: list[Loss] = []
        for first in range(0, len(numbers), micro):
            made = self._source.batch(numbers[first : first + micro], self.chunks(step))
            losses += [
                self._loss(rows_of(self._source, part, self._reasoning.carry, device))
                for part in by_length(made, self._source.pad)
            ]
        return losses

    def _loss(self, row: Row) -> Loss:
        share = len(row.ids_BT) / self._section.episodes

        def loss(model: StageBModel) -> Outcome:
            language_model = model.language_model
            output = language_model(row.ids_BT, cu_seqlens=row.cu_seqlens, fast_weights=FastWeightOptions(row.episodes))
            asked_BT = row.targets_BT != IGNORED
            # Every episode has weight 1, independent of its answer's length, so the divisor of the step is known.
            weights = (asked_BT / asked_BT.sum(1, keepdim=True).clamp(min=1))[asked_BT]
            targets = row.targets_BT[asked_BT]
            logits = language_model.logits(output.hidden_BTD[asked_BT])
            summed = (weights * functional.cross_entropy(logits, targets, reduction="none")).sum()
            total = summed / self._section.episodes
            correlation = torch.zeros((), device=total.device)
            if output.correlation is not None:
                correlation = output.correlation
                total = total + self._reasoning.plastic_lora.correlation_weight * share * correlation
            if output.router is not None:
                total = total + share * output.router.loss(self._model.feed_forward)
            rows = len(row.ids_BT)
            sums = torch.stack(
                [
                    summed.detach().float(),
                    (logits.argmax(-1) == targets).sum().float(),
                    asked_BT.sum().float(),
                    torch.tensor(float(rows), device=total.device),
                    rows * correlation.detach().float(),
                ]
            )
            return Outcome(total, sums)

        return loss

    def record(self, sums: dict[str, float]) -> dict[str, float]:
        """Mean loss of an episode; the share of the answers' tokens that are most probable; mean of the fast-weight
        updates' own objective."""
        return {
            "loss": sums["loss"] / max(sums["episodes"], 1),
            "accuracy": sums["correct"] / max(sums["answers"], 1),
            "correlation": sums["correlation"] / max(sums["episodes"], 1),
        }


@PHASES("plasticity")
def make_plasticity(config: Config, sources: Sources) -> PlasticityPhase:
    """The phase of a configuration."""
    return PlasticityPhase(config, sources(reasoning_of(config).plasticity))


@torch.no_grad()
def read(model: LanguageModel, chunks_BNC: Tensor, carry: str, pad: int) -> Iterator[tuple[list[int], Cache]]:
    """Rows whose documents end with the same chunk, and their cache after it, shortest documents first.

    All documents are read together, and one leaves after its last chunk. chunks_BNC: on the CPU; every row has a chunk
    with tokens, and those without are its last ones.
    """
    device = model.embedding.weight.device
    ends_B = chunk_counts(chunks_BNC, pad)
    assert ends_B.all(), "a document without a chunk"
    rows_B, cache = torch.arange(len(chunks_BNC)), None
    for number, ids_BC in enumerate(chunks_BNC.unbind(1), 1):
        cache = model(ids_BC[rows_B].to(device), cache=cache, return_cache=True).cache
        assert cache is not None
        if carry == "fast":
            cache = plastic_only(cache)
        ended_B = ends_B[rows_B] == number
        if ended_B.all():
            yield rows_B.tolist(), cache
            return
        if ended_B.any():
            ended, rows = select(cache, ended_B.to(device)), rows_B[ended_B].tolist()
            rows_B, cache = rows_B[~ended_B], select(cache, ~ended_B.to(device))  # this frees the whole one
            yield rows, ended


@torch.no_grad()
def answers(model: LanguageModel, source: EpisodeSource, episodes: Episodes, cache: Cache) -> tuple[Tensor, Tensor]:
    """(right, asked) bool [B, P]: asked, the probe's tokens that are answers; right, those that are most probable."""
    device = model.embedding.weight.device
    probe = source.probe(episodes)
    targets = probe.targets_BT.to(device)
    asked = targets != IGNORED
    hidden = model(probe.ids_BT.to(device), cache=cache).hidden_BTD
    right = torch.zeros_like(asked)
    right[asked] = model.logits(hidden[asked]).argmax(-1) == targets[asked]
    return right, asked


def zeroed(a: Tensor) -> Tensor:
    """Fast weights of zeros."""
    return torch.zeros_like(a)


def swapped(a: Tensor) -> Tensor:
    """The fast weights of the row before, for every row."""
    return a.roll(1, 0)


def accuracy(
    model: LanguageModel,
    source: EpisodeSource,
    carry: str,
    chunks: int,
    numbers: Sequence[int],
    changes: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
) -> dict[str, float]:
    """ "accuracy": the share of the answers' tokens that are most probable, and the same for each name in changes; of
    text also "exact": the share of episodes in which all of them are.

    changes: functions that change the fast weights between the last chunk and the question. A document that no other
    of its batch ends with has no others' fast weights, and does not count for `swapped`.
    """
    was_training = model.training
    model.eval()
    names = ["accuracy", *(changes or {})]
    right, asked, exact = dict.fromkeys(names, 0), dict.fromkeys(names, 0), 0
    for first in range(0, len(numbers), EVALUATION_ROWS):
        made = source.batch(numbers[first : first + EVALUATION_ROWS], chunks)
        for rows, cache in read(model, made.chunks_BNC, carry, source.pad):
            episodes = made.rows(rows)
            right_BP, asked_BP = answers(model, source, episodes, cache)
            right["accuracy"] += int(right_BP.sum())
            asked["accuracy"] += int(asked_BP.sum())
            exact += int((right_BP | ~asked_BP).all(1).sum())
            for name, change in (changes or {}).items():
                if change is swapped and len(rows) == 1:
                    continue
                right[name] += int(answers(model, source, episodes, with_fast_weights(cache, change))[0].sum())
                asked[name] += int(asked_BP.sum())
    model.train(was_training)
    shares = {name: right[name] / asked[name] for name in names if asked[name]}
    return shares | ({"exact": exact / max(len(numbers), 1)} if isinstance(source, TextEpisodes) else {})
