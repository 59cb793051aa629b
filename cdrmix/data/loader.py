"""Batches as a function of the step: keyed permutations of rows, so that resuming is O(1) and exact.

Global batch n of B rows holds the positions n * B .. n * B + B - 1 of an endless sequence in which epoch e is
the rows in an order given by (seed, e) alone. Micro-batches are dealt to the ranks in turn: micro-batch j of
rank r out of W is number j * W + r of its global batch. So neither the order nor the batches depend on W.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cdrmix.data.shards import Array, Split
from cdrmix.errors import ConfigError, ShardError

ROUNDS = 8  # of the Feistel network; four already pass for random (Luby and Rackoff 1988), more cost microseconds


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents. B rows, T positions a row.

    ids_BT, targets_BT: int64. weights_BT: float32, 1 where there is a target, 0 (and target 0) in a row's filling.
    cu_seqlens_N: int32, document starts in the flattened B * T positions, from 0 to B * T; every row starts one,
    and a row's filling is one. step: number of the batch. token_count: sum of the weights over the whole global
    batch, all ranks and micro-batches.
    """

    ids_BT: Tensor
    targets_BT: Tensor
    weights_BT: Tensor
    cu_seqlens_N: Tensor
    step: int
    token_count: float

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on a device; nothing is copied where they are there already."""
        return dataclasses.replace(
            self,
            ids_BT=self.ids_BT.to(device, non_blocking=True),
            targets_BT=self.targets_BT.to(device, non_blocking=True),
            weights_BT=self.weights_BT.to(device, non_blocking=True),
            cu_seqlens_N=self.cu_seqlens_N.to(device, non_blocking=True),
        )


class TrainLoader:
    """The batches of training: `micro_batches(step)` is a pure function of the arguments given here and the step.

    Raises ConfigError when the micro-batches of all ranks do not divide the global batch, ShardError when the
    shards were packed at another row length.
    """

    def __init__(
        self,
        split: Split,
        *,
        row_length: int,
        batch_rows: int,
        micro_batch_rows: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        check_row_length(split, row_length)
        assert 0 <= rank < world, f"rank {rank} of {world}"
        if batch_rows % (micro_batch_rows * world):
            raise ConfigError(
                f"train.batch_rows={batch_rows} must be a multiple of train.micro_batch_rows={micro_batch_rows} times "
                f"the {world} processes, {micro_batch_rows * world}"
            )
        self.split = split
        self.batch_rows, self.micro_batch_rows = batch_rows, micro_batch_rows
        self.seed, self.rank, self.world = seed, rank, world

    def epoch(self, step: int) -> float:
        """How many times the split has been gone through before step `step`."""
        return step * self.batch_rows / self.split.rows

    def rows(self, step: int) -> Array:
        """int64 [batch_rows]: the rows of global batch `step`, in order."""
        if step < 0:
            raise ValueError(f"step={step} is negative")
        positions = np.arange(step * self.batch_rows, (step + 1) * self.batch_rows, dtype=np.int64)
        epochs, places = np.divmod(positions, self.split.rows)
        rows = np.empty_like(places)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            rows[inside] = permute(places[inside], self.split.rows, (self.seed, int(epoch)))
        return rows

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of global batch `step`."""
        rows = self.rows(step)
        token_count = float(self.split.targets_in_rows(rows))
        dealt = rows.reshape(-1, self.world, self.micro_batch_rows)[:, self.rank]
        return [make_batch(self.split, micro, step=step, token_count=token_count) for micro in dealt]


class EvalLoader:
    """Rows in order, every row once over all ranks; the last batch may be smaller.

    max_rows: as many rows, spread evenly over the split; None: all. token_count of a batch counts that batch alone.
    Every rank yields the same number of batches, so that collective operations of the model match: where the
    rows run out, a batch of one row without targets.
    """

    def __init__(
        self,
        split: Split,
        row_length: int,
        micro_batch_rows: int,
        max_rows: int | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        check_row_length(split, row_length)
        assert 0 <= rank < world, f"rank {rank} of {world}"
        count = split.rows if max_rows is None else min(max_rows, split.rows)
        self.split = split
        self.rows: Array = np.arange(count, dtype=np.int64) * split.rows // count
        self.micro_batch_rows = micro_batch_rows
        self.rank, self.world = rank, world

    def __len__(self) -> int:
        """Batches that each rank yields."""
        return math.ceil(len(self.rows) / (self.micro_batch_rows * self.world))

    def __iter__(self) -> Iterator[Batch]:
        for step in range(len(self)):
            start = (step * self.world + self.rank) * self.micro_batch_rows
            rows = self.rows[start : start + self.micro_batch_rows]
            yield make_batch(self.split, rows, step=step, token_count=float(self.split.targets_in_rows(rows)))

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes that the targets of these rows, of all ranks, stand for; end-of-text stands for none.

        For all rows this is the split's text.
        """
        lengths = np.array(self.split.token_byte_lengths(), np.int64)
        return sum(
            int(lengths[self.split.read(int(start) + 1, int(start) + int(length) + 1)].sum())
            for row in self.rows
            for start, length in zip(*self.split.segments(row), strict=True)
        )


def make_batch(split: Split, rows: Array, *, step: int, token_count: float) -> Batch:
    """The batch of these rows; of no rows, one row without targets."""
    height, width = max(len(rows), 1), split.row_length
    ids = np.full((height, width), split.end_of_text_id, np.int64)
    targets = np.zeros((height, width), np.int64)
    weights = np.zeros((height, width), np.float32)
    boundaries = [0] if len(rows) else [0, width]
    for place, row in enumerate(rows):
        column = 0
        for start, length in zip(*split.segments(row), strict=True):
            tokens = split.read(int(start), int(start) + int(length) + 1)
            stop = column + int(length)
            ids[place, column:stop] = tokens[:-1]
            targets[place, column:stop] = tokens[1:]
            weights[place, column:stop] = 1
            boundaries.append(place * width + stop)
            column = stop
        if column < width:
            boundaries.append((place + 1) * width)
    return Batch(
        ids_BT=torch.from_numpy(ids),
        targets_BT=torch.from_numpy(targets),
        weights_BT=torch.from_numpy(weights),
        cu_seqlens_N=torch.tensor(boundaries, dtype=torch.int32),
        step=step,
        token_count=token_count,
    )


def check_row_length(split: Split, row_length: int) -> None:
    """Raises ShardError when the split was packed at another row length."""
    if split.row_length != row_length:
        raise ShardError(
            f"the shards hold rows of {split.row_length} tokens, the configuration says data.row_length={row_length}; "
            "prepare the text again with this configuration"
        )


def permute(places: Array, size: int, key: tuple[int, ...]) -> Array:
    """int64 [n]: where the permutation of 0 .. size - 1 that `key` names takes each of `places`, int64 [n].

    A Feistel network on the smallest even number of bits that holds `size`, walked until it lands inside
    (Black and Rogaway 2002). Raises IndexError for a place outside, from which the walk need not end.
    """
    places = np.asarray(places, np.int64)
    if len(places) and (places.min() < 0 or places.max() >= size):
        raise IndexError(f"places {places.min()} .. {places.max()} are not all in 0 .. {size - 1}")
    half_bits = np.uint64(max(2, ((size - 1).bit_length() + 1) // 2))
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest()
    round_keys = np.frombuffer(digest, "<u8").astype(np.uint64)
    result = places.astype(np.uint64)
    outside = np.ones(len(places), np.bool_)
    while outside.any():
        result[outside] = _feistel(result[outside], half_bits, round_keys)
        outside = result >= size
    return result.astype(np.int64)


def _feistel(values: Array, half_bits: np.uint64, round_keys: Array) -> Array:
    """A bijection of uint64 values below 2 ** (2 * half_bits)."""
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for round_key in round_keys:
        # splitmix64's finalizer, a hash in which every bit of the input reaches every bit of the output
        mixed = right ^ round_key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        left, right = right, left ^ (mixed & mask)
    return (left << half_bits) | right
