"""Held-out nats and bytes of each document, from the same forward passes as the score of the whole text."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cdrmix.data.batch import Batch
from cdrmix.data.shards import Array, Split
from cdrmix.eval.countdown import Say, counted
from cdrmix.eval.perplexity import Score, bounded, evaluate, loss_model_nats


class DocumentScores(NamedTuple):
    """Of a split: the score of the whole, with its domains, and of each document that has targets.

    domains: names [N]. nats: float64 [N]. text_bytes: int64 [N]. The first sum to those of the score but for rounding,
    the others exactly. Two documents of a pair (an answer that is preferred and one that is not) count as one.
    """

    score: Score
    domains: list[str]
    nats: Array
    text_bytes: Array


def score_documents(
    loss_model: nn.Module,
    split: Split,
    *,
    row_length: int,
    micro_batch_rows: int,
    max_tokens: int | None = None,
    say: Say = lambda line: None,
) -> DocumentScores:
    """The scores of a split, in this process alone. loss_model: a LossModule. max_tokens, say: as of `held_out`.

    With max_tokens, of a document only the part in the rows that are read is scored.
    """
    loader = bounded(split, row_length, micro_batch_rows, max_tokens, say)
    nats = np.zeros(split.documents)
    text_bytes = np.zeros(split.documents, np.int64)
    seen = np.zeros(split.documents, bool)
    done = set[int]()

    def of_documents(model: nn.Module, batch: Batch) -> Tensor:
        if batch.step in done:  # again, for the part of one domain
            return loss_model_nats(model, batch)
        done.add(batch.step)
        first = batch.step * micro_batch_rows
        starts, lengths, counts = split.segments_of(loader.rows[first : first + micro_batch_rows])
        owners, which = np.unique(split.documents_at(starts), return_inverse=True)
        place = torch.from_numpy(_places(batch.weights_BT.shape, lengths, counts, which)).to(batch.weights_BT.device)
        sets = [batch.weights_BT, *(batch.weights_BT * (place == number) for number in range(len(owners)))]
        arguments = (batch.ids_BT, batch.targets_BT, torch.stack(sets), batch.documents, 1.0, 1.0)
        whole, *parts = model(*arguments).next_token_sum
        nats[owners] += torch.stack(parts).double().cpu().numpy()
        np.add.at(text_bytes, owners[which], split.segment_bytes(starts, lengths))
        seen[owners] = True
        return whole

    size = loader.text_bytes if split.weighted or len(loader.rows) < split.rows else split.text_bytes
    batches = counted(loader, len(loader), "held-out text", say)
    score = evaluate(loss_model, batches, size, domain_bytes=loader.domain_bytes, nats=of_documents, together=False)
    kept = np.flatnonzero(seen)
    domains = [split.domain_of(int(number)) for number in kept]
    return DocumentScores(score, domains, nats[kept], text_bytes[kept])


def _places(shape: torch.Size, lengths: Array, counts: Array, which: Array) -> Array:
    """int64 [B, T], the shape: the document of each position, -1 for filling. Segments fill rows from their start."""
    places = np.full(tuple(shape), -1, np.int64)
    ends = np.cumsum(counts)
    for row, (begin, end) in enumerate(zip(ends - counts, ends, strict=True)):
        filled = np.repeat(which[begin:end], lengths[begin:end])
        places[row, : len(filled)] = filled
    return places
