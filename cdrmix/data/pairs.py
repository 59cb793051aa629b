"""Batches of preference pairs: rows whose documents are chosen and rejected answers, with the pair of every token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cdrmix.data.batch import Batch
from cdrmix.data.loader import TrainLoader, make_batch
from cdrmix.data.shards import Array, Split


@dataclass(frozen=True, kw_only=True)
class PairBatch(Batch):
    """Rows of P pairs.

    answers_BT: int64, the answer of each target: 2 p for the chosen and 2 p + 1 for the rejected answer of pair p of
    the batch; -1 for padding. pairs_P: int64, their numbers in the split. pair_count: of the global batch.
    """

    answers_BT: Tensor
    pairs_P: Tensor
    pair_count: int

    ON_CPU = frozenset({"pairs_P"})

    def answer_weights(self) -> Tensor:
        """float32 [2 P, B, T]: for each answer the weights of its own targets, 0 elsewhere; [2, B, T] without pairs."""
        answers = torch.arange(max(2 * len(self.pairs_P), 2), device=self.answers_BT.device)
        return (self.answers_BT == answers[:, None, None]) * self.weights_BT


class PairLoader(TrainLoader):
    """The training batches of pairs. The rows of a step are those of TrainLoader."""

    def micro_batches(self, step: int) -> list[Batch]:
        """The micro-batches of this rank of global batch `step`, PairBatches."""
        rows = self.rows(step)
        pairs = int(self.split.segments_of(rows)[2].sum())
        tokens = self.split.weight_in_rows(rows)
        own = rows.reshape(-1, self.world_size, self.micro_batch_rows)[:, self.rank]
        return [make_pair_batch(self.split, micro, step=step, token_count=tokens, pair_count=pairs) for micro in own]


def make_pair_batch(
    split: Split, rows: Array, *, step: int = 0, token_count: float = 1.0, pair_count: int = 1
) -> PairBatch:
    """The batch of these rows; without rows, one row without targets."""
    batch = make_batch(split, rows, step=step, token_count=token_count)
    starts, lengths, counts = split.segments_of(rows)
    pairs, seconds = split.pairs_of(starts)
    width = split.row_length
    answers = np.full(batch.ids_BT.numel(), -1, np.int64)
    ends = np.cumsum(lengths)
    row_starts = np.repeat(np.append(0, ends)[np.cumsum(counts) - counts], counts)  # of the row of each segment
    positions = np.repeat(np.arange(len(rows)), counts) * width + ends - lengths - row_starts
    for pair, (position, length, second) in enumerate(zip(positions, lengths, seconds, strict=True)):
        answers[position : position + second] = 2 * pair
        answers[position + second : position + length] = 2 * pair + 1
    return PairBatch(
        **{field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)},
        answers_BT=torch.from_numpy(answers.reshape(batch.ids_BT.shape)),
        pairs_P=torch.from_numpy(pairs),
        pair_count=pair_count,
    )


def all_pairs(split: Split, rows: Array, micro_batch_rows: int, rank: int, size: int) -> Iterator[PairBatch]:
    """The pairs of these rows, each once over all ranks. Every rank yields as many batches."""
    for first in range(0, len(rows), micro_batch_rows * size):
        start = first + rank * micro_batch_rows
        yield make_pair_batch(split, rows[start : start + micro_batch_rows])
