"""Order as a function: permutations that are bijections, batches that do not depend on the number of ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdrmix.data.loader import Batch, EvalLoader, TrainLoader, permute
from cdrmix.data.prepare import prepare
from cdrmix.data.shards import ShardSet, Split
from cdrmix.errors import ConfigError, ShardError

ROW = 16


@pytest.fixture
def shards(make_config: Any, corpus: dict[str, Any]) -> ShardSet:
    return prepare(make_config(corpus, row_length=ROW, shard_tokens=500), say=lambda line: None)


def train_loader(split: Split, *, batch_rows: int = 4, micro: int = 2, **options: int) -> TrainLoader:
    return TrainLoader(split, row_length=ROW, batch_rows=batch_rows, micro_batch_rows=micro, seed=7, **options)


@given(st.integers(1, 5000), st.integers(0, 2**64), st.integers(0, 2**40))
def test_permute_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    places = np.arange(size)
    permuted = permute(places, size, (seed, epoch))
    assert permuted.dtype == np.int64
    np.testing.assert_array_equal(np.sort(permuted), places)
    # and a function of each place by itself
    some = places[:: max(1, size // 7)][::-1]
    np.testing.assert_array_equal(permute(some, size, (seed, epoch)), permuted[some])


@given(st.integers(2, 2**62), st.data())
def test_permute_stays_inside_a_large_domain(size: int, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=5, unique=True)))
    permuted = permute(places, size, (1, 2))
    assert (permuted >= 0).all()
    assert (permuted < size).all()
    assert len(set(permuted.tolist())) == len(places)


@pytest.mark.parametrize("place", [-1, 10, 10**9])
def test_a_place_outside_raises(place: int) -> None:
    with pytest.raises(IndexError, match=r"not all in 0 \.\. 9"):
        permute(np.array([0, place]), 10, (1, 1))


@pytest.mark.parametrize("size", [3, 10, 100])
def test_keys_send_a_place_everywhere_alike(size: int) -> None:
    keys = 1000
    counts = np.bincount([permute(np.array([1]), size, (seed, 0))[0] for seed in range(keys)], minlength=size)
    # each count is binomial; five standard deviations are passed once in 10^6
    assert np.abs(counts - keys / size).max() < 5 * math.sqrt(keys / size)


def test_an_epoch_gives_every_row_once_and_epochs_differ(shards: ShardSet) -> None:
    loader = train_loader(shards.train, batch_rows=6, micro=2)
    rows = shards.train.rows
    assert rows % 6, "the last batch of an epoch must reach into the next one for this test to mean anything"
    sequence = np.concatenate([loader.rows(step) for step in range(rows)])[: 3 * rows].reshape(3, rows)
    for epoch in sequence:
        assert sorted(epoch.tolist()) == list(range(rows))
    assert len({tuple(epoch) for epoch in sequence.tolist()}) == 3
    assert loader.epoch(0) == 0
    assert loader.epoch(rows) == 6


def test_a_batch_larger_than_the_split(shards: ShardSet) -> None:
    rows = shards.valid.rows
    loader = train_loader(shards.valid, batch_rows=3 * rows, micro=rows)
    assert np.bincount(loader.rows(5)).tolist() == [3] * rows


def equal(one: Batch, other: Batch) -> bool:
    names = ("ids_BT", "targets_BT", "weights_BT", "cu_seqlens_N")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names) and (
        (one.step, one.token_count) == (other.step, other.token_count)
    )


def test_batches_are_a_pure_function_of_the_step(shards: ShardSet) -> None:
    loader = train_loader(shards.train)
    forward = [loader.micro_batches(step) for step in range(5)]
    fresh = train_loader(shards.train)
    for step in (4, 0, 3, 3):
        assert all(map(equal, forward[step], fresh.micro_batches(step)))
    other_seed = TrainLoader(shards.train, row_length=ROW, batch_rows=4, micro_batch_rows=2, seed=8)
    assert not equal(forward[0][0], other_seed.micro_batches(0)[0])


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(shards: ShardSet, world: int) -> None:
    alone = train_loader(shards.train, batch_rows=12, micro=2)
    ranks = [train_loader(shards.train, batch_rows=12, micro=2, rank=rank, world=world) for rank in range(world)]
    for step in (0, 1, 100):
        batches = [loader.micro_batches(step) for loader in ranks]
        assert {len(of_rank) for of_rank in batches} == {6 // world}
        in_order = [of_rank[number] for number in range(6 // world) for of_rank in batches]
        assert all(map(equal, in_order, alone.micro_batches(step)))
        assert sum(float(batch.weights_BT.sum()) for batch in in_order) == in_order[0].token_count


def documents_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """(inputs, targets) of the stretches between boundaries that have targets."""
    ids, targets, weights = (x.flatten() for x in (batch.ids_BT, batch.targets_BT, batch.weights_BT))
    found = []
    for start, stop in zip(batch.cu_seqlens_N[:-1].tolist(), batch.cu_seqlens_N[1:].tolist(), strict=True):
        assert len(set(weights[start:stop].tolist())) == 1
        if weights[start]:
            found.append((ids[start:stop].tolist(), targets[start:stop].tolist()))
    return found


def test_batches_hold_the_documents(shards: ShardSet) -> None:
    """Pieces of documents, each position's target the token after it; together every token."""
    split = shards.train
    end = split.end_of_text_id
    targets_seen = np.zeros(split.vocab_size, np.int64)
    pieces = set()
    for batch in EvalLoader(split, ROW, 5):
        height = batch.ids_BT.shape[0]
        assert batch.ids_BT.dtype == batch.targets_BT.dtype == torch.int64
        assert (batch.weights_BT.dtype, batch.cu_seqlens_N.dtype) == (torch.float32, torch.int32)
        boundaries = batch.cu_seqlens_N.tolist()
        assert boundaries[0] == 0
        assert boundaries[-1] == height * ROW
        assert boundaries == sorted(set(boundaries))
        assert set(range(0, height * ROW, ROW)) <= set(boundaries)
        filling = batch.weights_BT == 0
        assert (batch.ids_BT[filling] == end).all()
        assert (batch.targets_BT[filling] == 0).all()
        assert batch.token_count == float(batch.weights_BT.sum())
        for inputs, targets in documents_of(batch):
            assert inputs[1:] == targets[:-1]
            pieces.add((*inputs, targets[-1]))
            targets_seen += np.bincount(targets, minlength=split.vocab_size)
    np.testing.assert_array_equal(targets_seen, split.token_counts())
    assert targets_seen.sum() == split.tokens - 1
    tokenizer = shards.tokenizer
    for text in split.text():
        ids = [end, *tokenizer.encode(text.decode()), end]
        for start in range(0, len(ids) - 1, ROW):
            assert tuple(ids[start : start + ROW + 1]) in pieces


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("max_rows", [None, 1, 7, 10**6])
def test_evaluation_reads_every_row_once(shards: ShardSet, world: int, max_rows: int | None) -> None:
    split = shards.train
    loaders = [EvalLoader(split, ROW, 3, max_rows, rank, world) for rank in range(world)]
    batches = [list(loader) for loader in loaders]
    assert {len(of_rank) for of_rank in batches} == {len(loaders[0])}, "ranks must call collectives equally often"
    rows = loaders[0].rows
    assert len(rows) == min(split.rows, max_rows or split.rows)
    assert sorted(set(rows.tolist())) == rows.tolist()
    count = sum(batch.token_count for of_rank in batches for batch in of_rank)
    assert count == split.targets_in_rows(rows)
    if max_rows == 7:
        assert rows[-1] >= split.rows * 6 // 7, "a sample must be spread over the split"


def test_bytes_of_the_targets(shards: ShardSet) -> None:
    split = shards.valid
    assert EvalLoader(split, ROW, 3).text_bytes == split.text_bytes
    assert 0 < EvalLoader(split, ROW, 3, max_rows=1).text_bytes <= split.text_bytes


def test_what_does_not_fit_is_refused(shards: ShardSet) -> None:
    with pytest.raises(ConfigError, match=r"train\.batch_rows=4 must be a multiple .*micro_batch_rows=2 times the 3"):
        train_loader(shards.train, world=3)
    with pytest.raises(ShardError, match=r"rows of 16 tokens, the configuration says data\.row_length=32"):
        TrainLoader(shards.train, row_length=32, batch_rows=4, micro_batch_rows=2, seed=1)
    with pytest.raises(ShardError, match="row_length=8"):
        EvalLoader(shards.valid, 8, 1)
    with pytest.raises(ValueError, match="step=-1 is negative"):
        train_loader(shards.train).micro_batches(-1)
