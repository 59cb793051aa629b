"""Loaders: batches are a function of the step by keyed permutations of rows, so that resuming is O(1) and exact.

Global batch n of B rows has the positions n * B .. n * B + B - 1 of an infinite sequence of rows. With a batch warm-up
the first batches are smaller, and config/batch_sizes.py gives the position at which batch n begins. Epoch e of the
sequence is a permutation of all rows that depends on (seed, e). With a curriculum, curriculum.py defines the sequence.
Micro-batches are assigned to the ranks in turn: micro-batch j of rank r of W ranks is number j * W + r of its global
batch. So neither the order nor the batches depend on W. With sequence parallelism a rank here is a group of processes,
each with a slice of the targets (`Batch.of_slice`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import torch

from cdrmix.config.batch_sizes import BatchSizes, BatchWarmup
from cdrmix.config.schema import Config
from cdrmix.config.schema_objectives import Objectives
from cdrmix.data.batch import Batch, PartCount
from cdrmix.data.curriculum import Mixture, make_mixture
from cdrmix.data.objectives import PARTS
from cdrmix.data.permutation import permute
from cdrmix.data.shards import Array, Split
from cdrmix.errors import ConfigError, ShardError


class Weighting(NamedTuple):
    """The weights of the parts of the loss, by name, and whether the loss is the sum of the means of the parts."""

    weights: Mapping[str, float]
    sum_of_means: bool

    @classmethod
    def of(cls, section: Objectives) -> Self | None:
        """As a configuration says; None without data.objectives.weights."""
        if section.weights is None:
            return None
        return cls(section.weights.model_dump(), section.normalise == "sum_of_means")

    def parts(self, counts: Mapping[str, float]) -> tuple[PartCount, ...]:
        """The parts of a global batch that are trained on. counts: of its tokens by part.

        With weights a and counts N, the factors make the sum of the losses over all tokens, divided by the number of
        tokens sum(N), one of
            sum(a * sum of the losses of the part) / sum(a * N)    a mean of all tokens
            sum(a / N * sum of the losses of the part)             the sum of the means
        """
        kept = {name: count for name, count in counts.items() if count > 0 and self.weights[name] > 0}
        tokens = sum(kept.values())
        total = sum(self.weights[name] * count for name, count in kept.items())
        return tuple(
            PartCount(
                name, PARTS.index(name), count, self.weights[name] * tokens / (count if self.sum_of_means else total)
            )
            for name, count in kept.items()
        )


class TrainLoader:
    """The training batches: `micro_batches(step)` is a pure function of the constructor's arguments and the step.

    batch_rows: of a step. batch_warmup: the rows of the first steps; None: all steps have batch_rows rows.
    slice_rank, slices: of the processes that share the tokens of this rank's rows.
    mixture: determines the order of the rows; None: a permutation of all rows per epoch, or their own order if
        `sequential`. weighting: the weights of the parts of the loss; None: all tokens count alike.
    passed_over: rows, before those of any step, that are not trained on.
    Raises ConfigError if the micro-batches of all ranks do not divide every global batch, and ShardError if the shards
    were packed at another row length.
    """

    passed_over: int = 0

    def __init__(
        self,
        split: Split,
        *,
        row_length: int,
        batch_rows: int,
        micro_batch_rows: int,
        seed: int,
        batch_warmup: BatchWarmup | None = None,
        rank: int = 0,
        world_size: int = 1,
        slice_rank: int = 0,
        slices: int = 1,
        mixture: Mixture | None = None,
        sequential: bool = False,
        weighting: Weighting | None = None,
    ) -> None:
        check_row_length(split, row_length)
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        self.sizes = BatchSizes.of(batch_rows, batch_warmup)
        for key, rows in (("batch_rows", batch_rows), ("batch_warmup.rows", self.sizes.first)):
            if rows % (micro_batch_rows * world_size):
                raise ConfigError(
                    f"train.{key}={rows} must be a multiple of train.micro_batch_rows={micro_batch_rows} times the "
                    f"{world_size} processes, {micro_batch_rows * world_size}"
                )
        self.split, self.micro_batch_rows = split, micro_batch_rows
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.slice_rank, self.slices = slice_rank, slices
        self.mixture, self.sequential, self.weighting = mixture, sequential, weighting

    def epoch(self, step: int) -> float:
        """The number of rows before those of step `step`, divided by the rows of the split."""
        return (self.sizes.before(step) + self.passed_over) / self.split.rows

    def rows(self, step: int) -> Array:
        """int64 [B], B = sizes.at(step): the rows of global batch `step`, in order. Raises ValueError if step < 0."""
        start = self.sizes.before(step) + self.passed_over
        positions = np.arange(start, start + self.sizes.at(step), dtype=np.int64)
        if self.mixture is not None:
            return self.mixture.rows(positions)
        epochs, within = np.divmod(positions, self.split.rows)
        if self.sequential:
            return within
        rows = np.empty_like(within)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            rows[inside] = permute(within[inside], self.split.rows, (self.seed, int(epoch)))
        return rows

    def micro_batches(self, step: int) -> list[Batch]:
        """The micro-batches of this rank of global batch `step`."""
        rows = self.rows(step)
        own = rows.reshape(-1, self.world_size, self.micro_batch_rows)[:, self.rank]
        if self.weighting is not None:
            parts = self.weighting.parts(self.split.parts_in_rows(rows))
            batches = [weighted_batch(self.split, micro, parts, step=step) for micro in own]
        else:
            token_count = self.split.weight_in_rows(rows) or 1.0  # if all weights are 0, the loss is 0, not 0 / 0
            batches = [make_batch(self.split, micro, step=step, token_count=token_count) for micro in own]
        return [batch.of_slice(self.slice_rank, self.slices) for batch in batches]


def train_loader(
    config: Config,
    split: Split,
    rank: int = 0,
    world_size: int = 1,
    slice_rank: int = 0,
    slices: int = 1,
    *,
    kind: type[TrainLoader] = TrainLoader,
) -> TrainLoader:
    """The training batches of a configuration, in the order of its curriculum. Raises as Mixture, TrainLoader.

    kind: the class of the loader.
    """
    return kind(
        split,
        row_length=config.data.row_length,
        batch_rows=config.train.batch_rows,
        micro_batch_rows=config.train.micro_batch_rows,
        batch_warmup=config.train.batch_warmup,
        seed=config.run.seed,
        rank=rank,
        world_size=world_size,
        slice_rank=slice_rank,
        slices=slices,
        mixture=make_mixture(config, split),
        sequential=config.data.order == "sequential",
        weighting=Weighting.of(config.data.objectives),
    )


class Prefetcher:
    """Makes the batches of a TrainLoader one step ahead in a thread; for a GPU in pinned memory.

    Batches are a function of the step, so there is no state to save. An error of the loader is raised by the call for
    its step. end: the step after the last one. device: of the training. A context manager: its exit ends the thread.
    """

    def __init__(self, loader: TrainLoader, end: int, device: torch.device) -> None:
        self.loader, self._end, self._pinned = loader, end, device.type == "cuda"
        start = functools.partial(torch.cuda.set_device, device) if self._pinned else None  # a thread starts on GPU 0
        self._pool = ThreadPoolExecutor(1, "cdrmix-loader", start)
        self._ahead: dict[int, Future[list[Batch]]] = {}

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def micro_batches(self, step: int) -> list[Batch]:
        """The micro-batches of this rank of global batch `step`. The thread then makes those of the next step."""
        made = self._ahead.pop(step, None) or self._pool.submit(self._make, step)
        self._ahead = {step + 1: self._pool.submit(self._make, step + 1)} if step + 1 < self._end else {}
        return made.result()

    def pass_over(self, rows: int) -> None:
        """Sets `passed_over` of the loader; what was made ahead is made anew."""
        for made in self._ahead.values():
            made.cancel()
        self._ahead = {}
        self._pool.submit(setattr, self.loader, "passed_over", rows).result()  # after what the thread is making

    def _make(self, step: int) -> list[Batch]:
        batches = self.loader.micro_batches(step)
        return [batch.pinned() for batch in batches] if self._pinned else batches


class EvalLoader:
    """The evaluation batches: rows in order, each row once over all ranks; the last batch may be smaller.

    A target has the weight 1, or 0 if its loss weight is 0. Of held-out text only conversations have such targets, so
    bits per byte are of the whole text, and of conversations of what is trained on.
    max_rows: number of rows, spread evenly over the split; None: all. The token_count of a batch is of that batch only.
    Every rank yields the same number of batches, so that collective operations match. A rank without further rows
    yields a batch of one row without targets.
    If the split has several domains, a batch has the rows of each of its domains. On every rank batch n has the same
    number of domains. If it has rows of fewer domains than that of another rank, it starts with domains without rows.
    """

    def __init__(
        self,
        split: Split,
        row_length: int,
        micro_batch_rows: int,
        max_rows: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        slice_rank: int = 0,
        slices: int = 1,
    ) -> None:
        check_row_length(split, row_length)
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        count = split.rows if max_rows is None else min(max_rows, split.rows)
        self.split = split
        self.rows: Array = np.arange(count, dtype=np.int64) * split.rows // count
        self.micro_batch_rows = micro_batch_rows
        self.rank, self.world_size = rank, world_size
        self.slice_rank, self.slices = slice_rank, slices
        domains = split.domain_rows()
        self._domains = [*domains] if len(domains) > 1 else []
        ends = [rows.stop for rows in domains.values()]
        self._row_domains = np.searchsorted(ends, self.rows, "right")  # the number of the domain of each row

    def __len__(self) -> int:
        """Number of batches of each rank."""
        return math.ceil(len(self.rows) / (self.micro_batch_rows * self.world_size))

    def __iter__(self) -> Iterator[Batch]:
        for step in range(len(self)):
            rows = self.rows[self._of_rank(step, self.rank)]
            batch = make_batch(self.split, rows, step=step, token_count=0)
            weights_BT = (batch.weights_BT > 0).float()
            whole = dataclasses.replace(
                batch,
                weights_BT=weights_BT,
                token_count=float(weights_BT.sum()),
                domains=self._batch_domains(step),
            )
            yield whole.of_slice(self.slice_rank, self.slices)

    def _of_rank(self, step: int, rank: int) -> slice:
        start = (step * self.world_size + rank) * self.micro_batch_rows
        return slice(start, start + self.micro_batch_rows)

    def _batch_domains(self, step: int) -> dict[str, torch.Tensor]:
        if not self._domains:
            return {}
        of_ranks = [np.unique(self._row_domains[self._of_rank(step, rank)]) for rank in range(self.world_size)]
        own = of_ranks[self.rank].tolist()
        others = [number for number in np.unique(self._row_domains).tolist() if number not in own]
        numbers = [*others[: max(map(len, of_ranks)) - len(own)], *own]
        rows = torch.from_numpy(self._row_domains[self._of_rank(step, self.rank)])
        rows = rows if len(rows) else torch.full((1,), -1)  # the row without targets
        return {self._domains[number]: rows == number for number in numbers}

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the targets of these rows over all ranks; an end-of-text has none.

        For all rows of a split without conversations this is its text.
        """
        return self._text_bytes(self.rows)

    @property
    def domain_bytes(self) -> dict[str, int]:
        """`text_bytes` by domain, of the domains that have rows here; {} if the split has one domain."""
        of_domains = {name: self.rows[self._row_domains == number] for number, name in enumerate(self._domains)}
        return {name: self._text_bytes(rows) for name, rows in of_domains.items() if len(rows)}

    def _text_bytes(self, rows: Array) -> int:
        starts, lengths, _ = self.split.segments_of(rows)
        return self.split.text_bytes_of(starts, lengths)


def make_batch(split: Split, rows: Array, *, step: int, token_count: float) -> Batch:
    """The batch of these rows; without rows, one row without targets."""
    height, width = max(len(rows), 1), split.row_length
    ids = np.full(height * width, split.end_of_text_id, np.int64)
    targets = np.zeros(height * width, np.int64)
    starts, lengths, counts = split.segments_of(rows)
    # A segment starts after the earlier segments of its row: the sum of all earlier lengths minus those of earlier
    # rows.
    ends = np.cumsum(lengths)
    last = np.cumsum(counts) - 1
    filled = np.zeros(height, np.int64)
    filled[: len(rows)] = np.diff(ends[last], prepend=0)
    before = np.arange(len(rows)) * width - (ends[last] - filled[: len(rows)])
    positions = ends - lengths + np.repeat(before, counts)
    split.copy_segments(starts, lengths, positions, ids, targets)
    is_token = np.arange(width) < filled[:, None]
    weights = is_token.astype(np.float32)
    if split.weighted:
        split.copy_weights(starts, lengths, positions, weights.reshape(-1))
    parts = None
    if split.parted:
        parts = np.zeros(height * width, np.uint8)
        split.copy_parts(starts, lengths, positions, parts)
    row_ends = np.arange(1, height + 1) * width
    boundaries = np.union1d(positions + lengths, np.append(row_ends, 0))
    if split.pairs:
        boundaries = np.union1d(boundaries, positions + split.pairs_of(starts)[1])
    return Batch(
        ids_BT=torch.from_numpy(ids.reshape(height, width)),
        targets_BT=torch.from_numpy(targets.reshape(height, width)),
        weights_BT=torch.from_numpy(weights),
        cu_seqlens_N=torch.from_numpy(boundaries.astype(np.int32)),
        step=step,
        token_count=token_count,
        parts_BT=None if parts is None else torch.from_numpy(parts.reshape(height, width)),
        tokens_N=None if is_token.all() else torch.from_numpy(np.flatnonzero(is_token)),
    )


def weighted_batch(split: Split, rows: Array, parts: Sequence[PartCount], *, step: int) -> Batch:
    """The batch of these rows with the weights of the shards times the factors of their parts."""
    batch = make_batch(split, rows, step=step, token_count=sum(part.tokens for part in parts) or 1.0)
    factors = torch.zeros(len(PARTS))
    for part in parts:
        factors[part.number] = part.factor
    of_tokens = factors[0] if batch.parts_BT is None else factors[batch.parts_BT.long()]
    return dataclasses.replace(batch, weights_BT=batch.weights_BT * of_tokens, parts=tuple(parts))


def check_row_length(split: Split, row_length: int) -> None:
    """Raises ShardError when the split was packed at another row length."""
    if split.row_length != row_length:
        raise ShardError(
            f"the shards hold rows of {split.row_length} tokens, the configuration says data.row_length={row_length}; "
            "prepare the text again with this configuration"
        )
